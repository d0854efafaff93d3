"""A step's rows, from the tables that vLLM's model runner keeps on the host: nothing is read back from the device.

vLLM has two model runners. `follow_runner` hides the difference: it tells the worker of every step once the runner has
put its requests in order, before attention metadata is built, and gives what the forward pass of that step has left.

Shapes: n requests and R rows (query tokens) of a step, d hidden size.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.lora.request import LoRARequest


@dataclass(frozen=True)
class StepRows:
    """The requests of a step in the order of their rows."""

    request_ids: Sequence[str]  # [n]
    num_computed: Sequence[int]  # [n], tokens of each request before this step
    num_scheduled: Sequence[int]  # [n], rows of each request
    # The rows that the step's CUDA graph was captured for, padding included; None if attention runs outside a graph.
    graph_rows: int | None = None

    @property
    def starts(self) -> list[int]:
        """The first row of each request, and the number of rows: [n + 1]."""
        return list(itertools.accumulate(self.num_scheduled, initial=0))


class RunnerTables(Protocol):
    """The running step of a model runner."""

    def final_hidden(self, num_rows: int) -> Tensor | None:
        """The step's final hidden states [R, d], after the last norm; the next step overwrites them.

        Call it between the runner's `execute_model` and `sample_tokens`. None if the step had no forward pass.
        """
        ...

    def take_back(self, request_id: str, redo_from: int) -> None:
        """Forget the one token that was sampled for a request that stays in the batch: its prompt is computed again
        from `redo_from` on. Call it before the step that does.
        """
        ...

    def process_logits(self, request_id: str) -> None:
        """From now on, a request's logits go through the logits processors, if it is in the batch."""
        ...

    def switch_adapter(self, request_id: str, adapter: LoRARequest) -> None:
        """A request that was preempted resumes with this adapter. Call it before that step."""
        ...

    def give_media(self, request_id: str, features: Sequence[Any]) -> None:
        """The features of a request's prompt with their data, which vLLM leaves out behind a hit of the prefix cache.

        Call it before the step that encodes them after all.
        """
        ...


def follow_runner(runner: Any, is_v2: bool, on_rows: Callable[[StepRows], None]) -> RunnerTables:
    """Call `on_rows` in every step of this runner as soon as its rows are known.

    Neither dummy runs nor the capture of CUDA graphs call it. Hooks of the model would not do in its place: replayed
    graphs do not call them.
    """
    return (_V2Tables if is_v2 else _V1Tables)(runner, on_rows)


class _V2Tables:
    def __init__(self, runner: Any, on_rows: Callable[[StepRows], None]) -> None:
        self._runner = runner
        prepare_inputs = runner.prepare_inputs

        def prepare_and_tell(scheduled: Any, state: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
            batch = prepare_inputs(scheduled, state, graph, *args, **kwargs)
            num_computed, num_scheduled = batch.num_computed_tokens_np.tolist(), batch.num_scheduled_tokens.tolist()
            on_rows(StepRows(batch.req_ids, num_computed, num_scheduled, _graph_rows(graph.cg_mode, graph)))
            return batch

        runner.prepare_inputs = prepare_and_tell

    def final_hidden(self, num_rows: int) -> Tensor | None:
        return _final_hidden(self._runner, num_rows)

    def take_back(self, request_id: str, redo_from: int) -> None:
        """Its tables are on the device: it counts tokens itself."""
        states = self._runner.req_states
        at = states.req_id_to_index[request_id]
        penalties = self._runner.sampler.penalties_state
        if penalties.use_penalty[at]:
            penalties.output_bin_counts[at].zero_()
        states.num_computed_tokens.stage_write_elem(at, redo_from)
        states.total_len.stage_write_elem(at, int(states.prompt_len.np[at]))
        states.apply_staged_writes()

    def process_logits(self, request_id: str) -> None:
        """It calls processors in steps that have a request for them; one that joins the batch says so itself."""
        at = self._runner.req_states.req_id_to_index.get(request_id)
        if at is not None:
            self._runner.sampler.needs_logits_processing[at] = True

    def switch_adapter(self, request_id: str, adapter: LoRARequest) -> None:
        """A request that resumes comes as a new one, with its adapter."""

    def give_media(self, request_id: str, features: Sequence[Any]) -> None:
        """And with its media; one that goes back in place still has them, or since vLLM 0.33 gets them again."""


class _V1Tables:
    def __init__(self, runner: Any, on_rows: Callable[[StepRows], None]) -> None:
        self._runner = runner
        prepare_inputs, choose_graph = runner._prepare_inputs, runner._determine_batch_execution_and_padding
        rows: list[StepRows] = []  # of the running step, until its graph is known

        def prepare_and_keep(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            prepared = prepare_inputs(scheduled, *args, **kwargs)
            ids = list(runner.input_batch.req_ids)
            num_computed = runner.input_batch.num_computed_tokens_cpu[: len(ids)].tolist()
            rows[:] = [StepRows(ids, num_computed, [scheduled.num_scheduled_tokens[request_id] for request_id in ids])]
            return prepared

        def choose_and_tell(*args: Any, **kwargs: Any) -> Any:
            chosen = choose_graph(*args, **kwargs)
            if rows:  # dummy runs choose a graph, too
                on_rows(replace(rows.pop(), graph_rows=_graph_rows(*chosen[:2])))
            return chosen

        runner._prepare_inputs = prepare_and_keep
        runner._determine_batch_execution_and_padding = choose_and_tell

    def final_hidden(self, num_rows: int) -> Tensor | None:
        return _final_hidden(self._runner, num_rows)

    def take_back(self, request_id: str, redo_from: int) -> None:
        """vLLM's own update drops the token, as for KV loads that failed; but a seeded generator has drawn for it."""
        state = self._runner.requests[request_id]
        if state.generator is not None:
            state.generator.manual_seed(state.sampling_params.seed)

    def process_logits(self, request_id: str) -> None:
        """They always do."""

    def switch_adapter(self, request_id: str, adapter: LoRARequest) -> None:
        self._runner.requests[request_id].lora_request = adapter

    def give_media(self, request_id: str, features: Sequence[Any]) -> None:
        self._runner.requests[request_id].mm_features = list(features)


def _final_hidden(runner: Any, num_rows: int) -> Tensor | None:
    """Both runners keep them until they sample."""
    state = runner.execute_model_state
    return None if state is None else state.hidden_states[:num_rows]


def _graph_rows(mode: CUDAGraphMode, graph: Any) -> int | None:
    """Of a complete graph; a piecewise one leaves attention out."""
    return int(graph.num_tokens) if mode == CUDAGraphMode.FULL else None
