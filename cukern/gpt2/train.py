"""Training as llm.c's train_gpt2cu: the same batches, schedules, printed lines, main.log and checkpoints, in
float32, TF32 or bfloat16."""

import errno
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from cukern import AdamW
from cukern.gpt2 import checkpoint, parallel
from cukern.gpt2.data import DataLoader, Tokenizer
from cukern.gpt2.evaluate import hellaswag_accuracy, read_hellaswag, sample_text, validation_loss
from cukern.gpt2.files import expect, full_disk, replace
from cukern.gpt2.model import GPT2
from cukern.gpt2.settings import Outliers, Settings, Step, learning_rate

UNCLIPPED = 3e38  # a norm that no finite float32 gradient of use exceeds
RNG = 13371337  # llm.c's first state of stochastic rounding, which cukern draws from the step


class Trainer:
    """One training run.

        settings = Settings("data/*_train_*.bin", "data/*_val_*.bin", out="run", checkpoint_every=100)
        Trainer(model, settings).run()

    Args:
        model: float32 or bfloat16, on any device. Its parameters are trained, or replaced by those of the
            checkpoint. With bfloat16 the optimizer keeps float32 weights, or without `master` rounds
            stochastically (on a CPU: to the nearest).
        tokenizer: decodes samples; without one no samples are drawn. say: called with each printed line,
            except those of the updates.

    Runs with equal settings on one machine give the same bits, also after a stop and a resume. Exception:
    with skip_loss or skip_norm the windows of the z-scores are empty after a resume, as in llm.c. Raises
    ValueError for data shorter than a batch, a checkpoint of another shape, dtype, rank or number of
    processes, and sequences longer than the model's; FileNotFoundError for missing files.
    """

    def __init__(
        self,
        model: GPT2,
        settings: Settings,
        tokenizer: Tokenizer | None = None,
        say: Callable[[str], object] = print,
    ) -> None:
        s, config = settings, model.config
        self.model, self.settings, self.tokenizer, self.say = model, settings, tokenizer, say
        self.step, self.device = 0, model.wte.device  # step: completed updates
        # step and loss of each
        self.losses, self.validations = list[tuple[int, float]](), list[tuple[int, float]]()
        expect(
            model.wte.dtype in checkpoint.DTYPES.values(),
            "a float32 or bfloat16 model",
            model.wte.dtype,
            error=TypeError,
        )
        expect(
            s.seq_len <= config.max_seq_len,
            f"seq_len of at most the model's max_seq_len = {config.max_seq_len}",
            s.seq_len,
        )
        pattern, vocabulary = s.val_data if s.overfit else s.train_data, config.vocab_size
        options: dict[str, Any] = {"rank": s.rank, "num_processes": s.num_processes, "vocab_size": vocabulary}
        self.train_data = DataLoader(pattern, s.batch, s.seq_len, shuffle=not s.overfit, **options)
        self.val_data = DataLoader(s.val_data, s.batch, s.seq_len, **options)
        self.total = s.steps if s.steps >= 0 else self.train_data.num_tokens // (s.tokens * s.micro_steps)
        expect(
            self.total > 0 or s.steps == 0,
            f"at least one update's {s.tokens * s.micro_steps} tokens",
            self.train_data.num_tokens,
            pattern,
        )
        self.val_batches = s.val_batches if s.val_batches >= 0 else self.val_data.num_tokens // s.tokens
        self.examples = read_hellaswag(s.hellaswag, vocabulary) if s.hellaswag else []
        # of an update; its batches; loss and norm
        self.graph: tuple[torch.cuda.CUDAGraph, Tensor, Tensor] | None = None
        self.eager_updates = 0  # before the capture of a graph
        self.skips = s.skip_loss > 0 or s.skip_norm > 0
        self.parts = s.num_processes if s.zero else 1  # of the optimizer's state
        state = self._start()
        self.resumed = state is not None
        self.network = parallel.wrap(model, s.zero)  # may replace the parameters
        self.optimizer = self._optimizer()
        if state is not None:
            self._restore(state)
        self.position = self.train_data.state()  # of the loader before the next batches
        self.ahead: Tensor | None = None  # the next batches
        self.outliers = Outliers(), Outliers()  # of losses and norms

    def _optimizer(self) -> Any:
        s, model = self.settings, self.model
        of_bfloat16: dict[str, Any] = {
            "master_weights": s.master,
            "stochastic_rounding": not s.master and model.wte.is_cuda,
        }
        max_norm = s.max_norm or UNCLIPPED
        return AdamW(
            model.decay_groups(s.weight_decay), lr=s.lr, betas=s.betas, max_norm=max_norm, **of_bfloat16
        )

    def _rate(self) -> float:
        """The learning rate of the next update."""
        s = self.settings
        return learning_rate(self.step, self.total, s.lr, s.schedule, s.warmup, s.final_fraction)

    def save(self) -> None:
        """Write a checkpoint, then delete those that are too old. Each process calls this."""
        s, model = self.settings, self.model
        assert s.out is not None

        def part_of(key: str) -> dict[str, Tensor]:
            def tensor_of(p: Tensor) -> Tensor:  # before the first update there is no state: moments are 0
                default = p.detach().float() if key == "master" else torch.zeros_like(p, dtype=torch.float32)
                return parallel.local(self.optimizer.state.get(p, {}).get(key, default)).cpu()

            return model.by_name(tensor_of)

        m, v, master = part_of("exp_avg"), part_of("exp_avg_sq"), part_of("master") if s.master else None
        state = checkpoint.State(
            self.step, m, v, self.position, master, RNG, RNG, s.rank, s.num_processes, self.parts
        )
        checkpoint.save(s.out, model.config, model.parameters_by_name(), state)
        self._prune()

    def _prune(self) -> None:
        s = self.settings
        if s.out is not None and s.rank == 0 and s.keep and s.checkpoint_every:
            checkpoint.prune(s.out, self.step - s.keep * s.checkpoint_every, s.major_every)

    def _start(self) -> checkpoint.State | None:
        """Go to the newest checkpoint, if there is one: model and loader get their state. Lines of main.log
        from its step on are removed, because those steps run again."""
        s, model = self.settings, self.model
        if s.out is None:
            return None
        newest = checkpoint.latest_step(s.out)
        expect(
            s.resume or newest is None,
            "a folder without checkpoints, or resume",
            f"a checkpoint of step {newest}",
            s.out,
        )
        state = None
        if newest is not None:
            weights, path, _ = checkpoint.paths(s.out, newest)
            config, parameters = checkpoint.read_model(weights, model.config)
            expect(
                parameters["wte"].dtype == model.wte.dtype,
                f"weights of {model.wte.dtype}",
                parameters["wte"].dtype,
                weights,
            )
            state = checkpoint.read_any_state(s.out, newest, config, s.rank, s.num_processes, self.parts)
            expect(state.step == newest, f"the state of step {newest}", state.step, path)
            if state.num_processes == s.num_processes:
                self.train_data.resume(state.loader)
            else:
                self.train_data.skip(newest * s.micro_steps)
                now = f"{s.num_processes} process{'es' * (s.num_processes > 1)}"
                place = f"the position in the data is that of a run with {now} after {newest} updates"
                self.say(
                    f"the checkpoint is of {state.num_processes} processes; optimizer state divided anew; "
                    f"{place}"
                )
            model.load_parameters(parameters)
            self.step = newest
        parallel.barrier()  # the others have looked for a checkpoint
        if s.rank == 0:
            Path(s.out).mkdir(parents=True, exist_ok=True)
            self._cut_log(Path(s.out, "main.log"), r"^s:(\d+) .*\n")
            self._cut_log(Path(s.out, "main.jsonl"), r'^\{"step": (\d+), .*\}\n')
            if state is not None:
                self._prune()
        return state

    def _cut_log(self, log: Path, line: str) -> None:
        """Keep only the lines of steps before this one. The others run again."""
        text = log.read_text() if log.exists() else ""
        with replace(log) as file:
            file.writelines(
                m[0].encode() for m in re.finditer(line, text, re.MULTILINE) if int(m[1]) < self.step
            )

    def _restore(self, state: checkpoint.State) -> None:
        """Give the optimizer its moments, and its float32 weights if the file has them."""
        named = {"exp_avg": state.m, "exp_avg_sq": state.v}
        if state.master and self.settings.master and self.model.wte.dtype == torch.bfloat16:
            named["master"] = state.master
        for name, parts in self.model.parts().items():
            for i, p in enumerate(parts):
                whole = state.parts == 1
                slot = {
                    key: parallel.like(p, tensors[name].view(len(parts), -1)[i], whole)
                    for key, tensors in named.items()
                }
                self.optimizer.state[p] = {
                    "step": torch.tensor(float(state.step), dtype=torch.float32, device="cpu"),
                    **slot,
                }
        self.optimizer.load_state_dict(self.optimizer.state_dict())  # copies them to the device

    def _log(self, text: str) -> None:
        self._append("main.log", f"s:{self.step} {text}\n")

    def _log_json(self, step: int, **numbers: float | None) -> None:
        """A line of main.jsonl, for trackers of experiments. `step`: the number of updates before it. Not
        finite: null."""
        known = {name: x if x is not None and math.isfinite(x) else None for name, x in numbers.items()}
        self._append("main.jsonl", json.dumps({"step": step, **known}) + "\n")

    def _append(self, name: str, line: str) -> None:
        if self.settings.out is None or self.settings.rank:
            return
        path = Path(self.settings.out, name)
        try:
            with open(path, "a") as file:
                file.write(line)
        except OSError as error:
            raise full_disk(path, len(line)) if error.errno == errno.ENOSPC else error from None

    def run(self, report: Callable[[Step], object] = print) -> None:
        """Train to the end. `report` is called after each update; str(step) is llm.c's line. Raises
        FloatingPointError if the loss or the norm of the gradient is not finite, and OSError if a file cannot
        be written; the last complete checkpoint remains."""
        try:
            self._run(report)
            self.close()
        except OSError as error:
            if error.errno != errno.ENOSPC or self.settings.out is None:
                raise
            newest = checkpoint.latest_step(self.settings.out)
            left = (
                "there is no checkpoint yet"
                if newest is None
                else f"the last checkpoint, of step {newest}, is whole"
            )
            raise OSError(f"{error}; {left}") from None

    def _run(self, report: Callable[[Step], object]) -> None:
        s, start, speed, ms_sum = self.settings, self.step, 0.0, 0.0
        if self.resumed and start >= self.total:
            self.say(f"no updates: the checkpoint has {start}, and the run ends after {self.total}")
        while True:
            last = self.step >= self.total
            self._evaluate(last)
            due = last or (self.step > 0 and s.checkpoint_every > 0 and self.step % s.checkpoint_every == 0)
            if s.checkpoint_every and due and (self.step > start or not self.resumed):
                self.save()
            if last:
                break
            begin = time.perf_counter()
            loss, norm, lr = self.update()
            seconds = time.perf_counter() - begin
            tokens_per_s, done = s.tokens * s.micro_steps / seconds, self.step - start - 1
            mfu = (
                None
                if s.peak_flops is None
                else self.flops_per_token() * tokens_per_s / s.num_processes / s.peak_flops
            )
            if done:  # the first update compiles kernels
                ms_sum += 1e3 * seconds
                speed = 0.95 * speed + 0.05 * tokens_per_s
                tokens_per_s = speed / (1 - 0.95**done)
            self.losses.append((self.step, loss[0]))
            numbers = {"ms": 1e3 * seconds, "tokens_per_s": tokens_per_s, "mfu": mfu}
            self._log_json(self.step - 1, loss=loss[0], norm=norm[0], lr=lr, **numbers)
            report(Step(self.step, self.total, *loss, *norm, lr, 1e3 * seconds, mfu, tokens_per_s))
        if self.step - start > 1:
            self.say(f"total average iteration time: {ms_sum / (self.step - start - 1):f} ms")

    def flops_per_token(self) -> int:
        """llm.c's count: 6 per parameter, and 6 L C T for causal attention."""
        c = self.model.config
        return 6 * c.num_parameters + 6 * c.num_layers * c.channels * self.settings.seq_len

    def _evaluate(self, last: bool) -> None:
        """What is due before an update, or after the last one: validation, HellaSwag, a sample."""
        s = self.settings
        if s.val_every and (last or self.step % s.val_every == 0):
            loss = validation_loss(self.model, self.val_data, self.val_batches)
            loss = parallel.mean(torch.tensor(loss, dtype=torch.float32, device=self.device)).item()
            self.say(f"val loss {loss:f}")
            self._log(f"tel:{loss:.4f}")
            self._log_json(self.step, val_loss=loss)
            self.validations.append((self.step, loss))
            if self.examples and (last or self.step):
                right, count = hellaswag_accuracy(self.model, self.examples, max(4, s.batch))
                self.say(f"HellaSwag: {right}/{count} = {right / count:f}")
                self._log(f"eval:{right / count:.4f}")
                self._log_json(self.step, hellaswag=right / count)
        if s.sample_every and self.tokenizer and (last or (self.step and self.step % s.sample_every == 0)):
            text = sample_text(
                self.model, self.tokenizer, s.sample_tokens, prompt=s.prompt, temperature=s.temperature
            )
            self.say(f"generating:\n---\n{text}\n---")
        # FSDP2, after a forward without a backward: keep only this process's part of the parameters
        if hasattr(self.network, "reshard"):
            self.network.reshard()

    def update(self) -> tuple[tuple[float, float], tuple[float, float], float]:
        """One update: (loss, its z-score), (norm of the gradient, its z-score), learning rate. Reads from the
        device once."""
        s, lr = self.settings, self._rate()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batches = self._read() if self.ahead is None else self.ahead
        if self.model.dropout:  # a function of the step, so that a resumed run draws the same
            torch.manual_seed(((s.seed << 32) + self.step * s.num_processes + s.rank) % 2**63)
        on_device = self._replay(batches) if self._replays() else self._launch(batches)
        self.ahead = self._read()  # while the device works
        numbers = on_device.tolist()
        if not all(map(math.isfinite, numbers)):
            values = f"step {self.step + 1}: loss {numbers[0]}, norm of the gradient {numbers[1]}"
            raise FloatingPointError(
                f"{values}; the first tensor that is not finite: {self._not_finite(numbers[0])}"
            )
        z = [detector.z_score(value) for value, detector in zip(numbers, self.outliers, strict=True)]
        if self.skips:
            self._apply_or_skip(*z)
        self._log(f"trl:{numbers[0]:.4f} lr:{lr:.6f} norm:{numbers[1]:.2f}")
        self.step += 1
        return (numbers[0], z[0]), (numbers[1], z[1]), lr

    def _replays(self) -> bool:
        """True if updates are replays of a CUDA graph."""
        return self.device.type == "cuda" and self.settings.graph

    def close(self) -> None:
        """Free the CUDA graph. NCCL's communicators wait for those that use them before they end."""
        self.graph = None

    def _apply_or_skip(self, loss_z: float, norm_z: float) -> None:
        s = self.settings
        # false for NaN
        what = "loss" if 0 < s.skip_loss < loss_z else "grad" if 0 < s.skip_norm < norm_z else ""
        if what:
            self.say(f"skipping update due to {what} z-score of {loss_z if what == 'loss' else norm_z:f}")
            for slot in self.optimizer.state.values():
                slot["step"] += 1  # llm.c's bias correction counts skipped updates
        else:
            self.optimizer.step()

    def _read(self) -> Tensor:
        """The next batches, (micro_steps, 2, B, T), inputs and targets, on their way to the device."""
        if self.settings.overfit:
            self.train_data.reset()
        self.position = self.train_data.state()
        batches = torch.stack(
            [torch.stack(self.train_data.next_batch()) for _ in range(self.settings.micro_steps)]
        )
        return (
            batches.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else batches
        )

    def _launch(self, batches: Tensor) -> Tensor:
        """Update the weights, or with skip_loss and skip_norm only compute the gradients. The mean loss and
        the norm, on the device."""
        self.optimizer.zero_grad()
        mean = parallel.mean(self._backward(batches))
        self.optimizer.found_inf = (~mean.isfinite()).float()  # the parameters stay as they are
        if self.skips:
            norm: Any = parallel.full(
                get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
            )
        else:
            self.optimizer.step()
            norm = self.optimizer.grad_norm
        return torch.stack([mean, norm.float()])

    def _backward(self, batches: Tensor) -> Tensor:
        """Compute the gradients of batches, and their mean loss. The processes average the gradients after
        the last one."""
        losses = []
        for i, batch in enumerate(batches):
            parallel.backward_averages(self.network, i == len(batches) - 1)
            loss = self.network(*batch) / len(batches)
            loss.backward()
            losses.append(loss.detach())
        parallel.average_gradients(self.model.parameters())
        return torch.stack(losses).sum()

    def _replay(self, batches: Tensor) -> Tensor:
        """`_launch` as a CUDA graph. The first two updates run without, which compiles kernels; then the
        graph is captured."""
        self.optimizer.update_groups()  # a graph reads the learning rate from device memory
        if self.graph is None and self.eager_updates < 2:
            self.eager_updates += 1
            return self._launch(batches)
        if self.graph is None:
            self.optimizer.zero_grad()
            graph, inputs = torch.cuda.CUDAGraph(), torch.zeros_like(batches)
            free_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
            # so that the graph has one of its own: others, such as torch.compile, free that of eager calls
            free_workspaces()
            # NCCL's own thread asks for its events meanwhile
            with torch.cuda.graph(
                graph, capture_error_mode="thread_local" if self.settings.num_processes > 1 else "global"
            ):
                numbers = self._launch(inputs)
            free_workspaces()
            self.graph = graph, inputs, numbers
        graph, inputs, numbers = self.graph
        inputs.copy_(batches)
        graph.replay()
        return numbers

    def _not_finite(self, loss: float) -> str:
        """The first tensor in llm.c's order that is not finite. If the loss is finite, only gradients are
        searched."""
        tensors = {"gradient of": self.model.gradients_by_name()}
        if not math.isfinite(loss):
            tensors = {"parameter": self.model.parameters_by_name()} | tensors
        found = (
            f"{kind} {name}"
            for kind, named in tensors.items()
            for name, tensor in named.items()
            if not tensor.isfinite().all()
        )
        return next(found, "the loss")
