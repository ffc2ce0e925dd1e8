"""Failures of one process of many: the others end soon, with an error that says why."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

GRACE_SECONDS = 10
"""How long other processes have to end by themselves, and to say what was wrong, when one fails."""

_CONTACT = re.compile(r"(connection (closed|reset|refused)|broken pipe|socket (closed|timeout)|timed? ?out)", re.I)


def explain_lost_contact(error: BaseException) -> str | None:
    """What to tell when another process cannot be reached, because it has died of its own error; else None."""
    if not (torch.distributed.is_available() and isinstance(error, RuntimeError)):
        return None
    by_type = isinstance(error, torch.distributed.DistError)
    if not by_type and not (torch.distributed.is_initialized() and _CONTACT.search(str(error))):
        return None
    return (
        "another process of this run has ended or cannot be reached; its own message says why. Start all of them "
        f"again, with --ckpt_path last\n({type(error).__name__}: {error})"
    )


class FailTogether(Callback):
    """Ends the processes that Lightning has started when the one that started them fails.

    Lightning watches over the others' failures, torchrun and srun over everyone's; but nobody over the first one's,
    and the others may wait for it in a collective until that times out.
    """

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give the others a while, then kill them."""
        for process in getattr(trainer.strategy.launcher, "procs", []):
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
