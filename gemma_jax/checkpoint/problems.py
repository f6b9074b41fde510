"""Many problems, one error: a broken checkpoint is described whole rather than one fault a run."""

from gemma_jax.errors import CheckpointError

MAX_SHOWN = 10


class Problems:
    """Collects what is wrong with one checkpoint."""

    def __init__(self, where: object):
        self.where = where
        self.found: list[str] = []

    def add(self, problem: str) -> None:
        self.found.append(problem)

    def check(self) -> None:
        """Raises CheckpointError with the first problems; does nothing when there are none."""
        if not self.found:
            return
        if len(self.found) == 1:
            raise CheckpointError(f"{self.where}: {self.found[0]}")
        shown = "".join(f"\n  {problem}" for problem in self.found[:MAX_SHOWN])
        more = len(self.found) - MAX_SHOWN
        tail = f"\n  ... and {more} more" if more > 0 else ""
        raise CheckpointError(f"{self.where}: {len(self.found)} problems:{shown}{tail}")
