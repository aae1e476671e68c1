"""Every Python block of the README runs, in order, as one script."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_python_blocks_run(tmp_path):
    # In a process of its own: a user has neither x64 nor strict promotion.
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 11
    checks = (
        "assert (logits == model(ids)).all()",
        "assert jacobian.shape == (model.flow.width, *x0.shape)",
        "assert batch.shape == (2, len(ids), model.config.vocab_size)",
        "assert jnp.isfinite(batch).all()",
        "assert steered.config == model.config",
        "assert measured.prediction.regime == prediction.regime",
        "assert (jnp.diff(score.energy(ascent, climb), axis=0) < 1e-5).all()",
        "assert jnp.allclose(ut.run(machine, tokens @ program), ut.run(target, tokens), atol=1e-3)",
        "assert min(low, *(one.value for one in learnt.test)) > 0.9",
        "assert answers.shape == (17, task.classes)",
        "assert normal.shape == control.shape == (model.flow.depth,)",
        "assert jnp.allclose(path.xs[-1], sv.simulate(model.flow, x0).xs[-1], atol=1e-3)",
        "assert Js.shape == (model.flow.depth, model.flow.width, model.flow.width)",
    )
    script = "\n".join([*blocks, *checks])
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
