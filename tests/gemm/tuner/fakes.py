"""Products without a device, and a clock without time, for tests of the tuner."""

from tests.gemm.tuned import cublas


class Clock:
    """Time goes by only when somebody says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def way(number):
    """A configuration by its number, which the tests use as its name."""
    return cublas(workspace_bytes=number)


class FakeTrial:
    """A trial whose candidates take given times.

    Args:
        times: number of the configuration -> seconds of a run, or a function of the number of its
            measurement.
        faults: number -> what is wrong with the result.
    """

    def __init__(self, times, faults=(), clock=None, floats=10.0):
        self.times, self.faults, self.clock, self.floats = (
            times,
            dict(faults),
            clock or Clock(),
            floats,
        )
        self.measured = dict.fromkeys(times, 0)
        self.log = []
        self.closed = False

    def candidates(self):
        return [way(number) for number in self.times]

    def fault(self, configuration):
        self.log.append(("checked", configuration.workspace_bytes))
        self.clock.now += self._time(configuration)
        return self.faults.get(configuration.workspace_bytes)

    def seconds(self, configuration, repeats):
        self.log.append(("timed", configuration.workspace_bytes))
        time = self._time(configuration)
        self.measured[configuration.workspace_bytes] += 1
        self.clock.now += time * repeats
        return time

    def float_seconds(self, repeats):
        self.clock.now += self.floats * repeats
        return self.floats

    def close(self):
        self.closed = True

    def _time(self, configuration):
        time = self.times[configuration.workspace_bytes]
        return time(self.measured[configuration.workspace_bytes]) if callable(time) else time


class FakeBackend:
    """A backend whose every product has the same candidates.

    Args:
        times: as FakeTrial; the first is the default.
        before: called with the key before its trial is made; may raise.
    """

    def __init__(self, times, before=lambda key: None, clock=None, **options):
        self.times, self.before, self.clock, self.options = times, before, clock or Clock(), options
        self.keys = []
        self.trials = []

    def trial(self, key):
        self.before(key)
        self.keys.append(key)
        self.trials.append(FakeTrial(self.times, clock=self.clock, **self.options))
        return self.trials[-1]
