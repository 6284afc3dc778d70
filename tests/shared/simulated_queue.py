"""A GPU's stream on a clock of its own, for what times calls: `testing/timing.py` and those that use it."""

from contextlib import contextmanager

from flash_hopper.testing.clocks import ClockSampler, Sample


class SimulatedQueue:
    """A GPU that runs what it is given in order; times in microseconds. `log` lists what reached it."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def kernel(self, name, us):
        def launch():
            self.log.append(name)
            self.now += us

        return launch

    def record(self):
        return self.now

    def elapsed_us(self, start, end):
        return end - start

    def synchronize(self):
        self.log.append("synchronize")

    def wait_for(self, mark):
        assert mark <= self.now

    def hold(self, seconds):
        assert seconds > 0
        self.log.append("hold")
        self.now += 1e6 * seconds

    def flush_l2(self):
        self.log.append("flush")
        self.now += 50.0

    @contextmanager
    def clocks(self):
        with ClockSampler(lambda: Sample(1500.0, 690.0)) as sampler:
            yield sampler
