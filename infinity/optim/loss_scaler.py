"""The factor that keeps fp16 gradients out of the subnormals."""

from __future__ import annotations

from infinity.errors import NonFiniteError


class LossScaler:
    """Static, or dynamic as in mixed-precision training (Micikevicius et al., 2018, section 3.2).

    Dynamic: the scale halves when an overflow comes and ``hysteresis`` earlier ones were tolerated; it doubles after
    ``window`` steps without one; ``consecutive`` restores the tolerance after every good step. ``scale`` is always a
    power of two times the start, so unscaling is exact.
    """

    def __init__(
        self,
        scale: float,
        *,
        dynamic: bool,
        window: int = 1000,
        hysteresis: int = 2,
        minimum: float = 1.0,
        consecutive: bool = False,
    ) -> None:
        self.scale = scale
        self.dynamic = dynamic
        self.window = window
        self.minimum = minimum
        self.hysteresis = hysteresis
        self.consecutive = consecutive
        self._tolerance = hysteresis
        self._good_steps = 0

    def update(self, *, overflow: bool) -> None:
        """Learns whether the last step's gradients were finite."""
        if not self.dynamic:
            return
        if overflow:
            self._good_steps = 0
            if self._tolerance > 1:
                self._tolerance -= 1
            else:
                self.scale = max(self.scale / 2, self.minimum)
            return
        self._good_steps += 1
        if self.consecutive:
            self._tolerance = self.hysteresis
        if self._good_steps % self.window == 0:
            self._tolerance = self.hysteresis
            self.scale *= 2

    @property
    def exhausted(self) -> bool:
        """Whether an overflow can no longer be answered by a smaller scale."""
        return not self.dynamic or self.scale <= self.minimum

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "tolerance": self._tolerance, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores what ``state_dict`` gave."""
        self.scale = float(state["scale"])
        self._tolerance = int(state["tolerance"])
        self._good_steps = int(state["good_steps"])


class NonFiniteGuard:
    """Counts steps in a row whose gradients were not finite; raises when there were ``limit``."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = 0

    def update(self, culprit: str | None, *, excused: bool) -> None:
        """``culprit`` names the first non-finite parameter; an excused one (fp16 finding its scale) is not counted."""
        if culprit is None:
            self.in_a_row = 0
            return
        if excused:
            return
        self.in_a_row += 1
        if self.in_a_row >= self.limit:
            raise NonFiniteError(
                f"{self.in_a_row} steps in a row had a non-finite gradient, first seen in {culprit}. No weight was "
                "changed by them. Lower the learning rate, look at the data, or raise infinity.non_finite_limit"
            )
