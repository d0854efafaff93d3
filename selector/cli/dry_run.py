"""`inducekv-select --dry-run`: what a run would read, compute and write, without writing anything."""

from pathlib import Path

from ..backbone.model import Backbone
from ..backbone.scoring import Scorer
from ..run import CheckedTask


def dry_run(backbone: Backbone, task: CheckedTask, output: Path) -> None:
    """Print it. Raises what the run itself would raise before it computes anything."""
    inputs, scorer = task.inputs, Scorer(backbone)
    costs = task.request.recipe.costs(scorer, inputs, task.request.settings)
    if inputs.training:
        examples = (*inputs.training, *inputs.validation)
        lengths = [scorer.prefix(e)["input_ids"].shape[1] + len(scorer.answer_tokens(e)) for e in examples]
        tasks = ", ".join(dict.fromkeys(example.task for example in inputs.training))
        print(f"task: {tasks}; {len(inputs.training)} training and {len(inputs.validation)} validation examples")
        print(f"tokens with the answer: {sum(lengths) / len(lengths):.0f} on average, {max(lengths)} at most")
    for name, text in costs.items():
        print(f"{name}: {text}")
    print(f"{output}: not written, this was a dry run")
