"""`python -m flash_hopper` is the command `flash-hopper`."""

from flash_hopper.cli.main import main

if __name__ == "__main__":
    main()
