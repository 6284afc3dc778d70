"""How people reach it: the command `flash-hopper`, one module per subcommand."""
