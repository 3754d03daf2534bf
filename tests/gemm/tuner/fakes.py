"""Products without a device, and a clock without time, for tests of the tuner."""

from lsq.gemm.configuration import CpuConfiguration


class Clock:
    """Time goes by only when somebody says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def way(rows):
    """A configuration by its number of rows, which the tests use as its name."""
    return CpuConfiguration(rows=rows)


class FakeTrial:
    """A trial whose candidates take given times.

    Args:
        times: rows of the configuration -> seconds of a run, or a function of the number of its
            measurement.
        faults: rows -> what is wrong with the result.
    """

    def __init__(self, times, faults=(), clock=None, floats=10.0):
        self.times, self.faults, self.clock, self.floats = (
            times,
            dict(faults),
            clock or Clock(),
            floats,
        )
        self.measured = {rows: 0 for rows in times}
        self.log = []
        self.closed = False

    def candidates(self):
        return [way(rows) for rows in self.times]

    def fault(self, configuration):
        self.log.append(("checked", configuration.rows))
        self.clock.now += self._time(configuration)
        return self.faults.get(configuration.rows)

    def seconds(self, configuration, repeats):
        self.log.append(("timed", configuration.rows))
        time = self._time(configuration)
        self.measured[configuration.rows] += 1
        self.clock.now += time * repeats
        return time

    def float_seconds(self, repeats):
        self.clock.now += self.floats * repeats
        return self.floats

    def close(self):
        self.closed = True

    def _time(self, configuration):
        time = self.times[configuration.rows]
        return time(self.measured[configuration.rows]) if callable(time) else time


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
