# %% [markdown]
# # 17 · Fine-tune a real model
#
# A loop of your own, this library's training program `fsdp_utils.train`, or transformers' `Trainer`: which
# one? **`Trainer` if you live in transformers' datasets and callbacks, `fsdp_utils.train` if the run must
# survive interruptions, your own loop if a step is more than one loss.** Losses and the bytes at rest decide
# nothing: given the same settings, they are equal.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

layers = {
    "a loop of your own": ["the loop", "your loop", "you, by shard(model)", "you, by torch's DCP"],
    "fsdp_utils.train": ["settings", "the program", "the program", "the program"],
    "Trainer": ["TrainingArguments", "Trainer", "Accelerate", "Trainer and Accelerate"],
}
names = ["you write", "runs each step", "calls fully_shard", "saves checkpoints"]
plots.layers(
    {way: dict(zip(names, has)) for way, has in layers.items()},
    above=["the same weights, samples, AdamW and clipping"], below=["torch's fully_shard (FSDP2)"],
    alt="Three programs between what they are given and torch's fully_shard, which all three call.",
)

# %% [markdown]
# A drawing. The three programs share what is grey, and differ in who does the work in between. Accelerate is
# the library under `Trainer` that decides how to distribute. DCP is `torch.distributed.checkpoint`.

# %% tags=["card"]
lesson.card(
    17,
    learn="choose a training program, and find where three of them differ although their losses do not",
    needs="[lesson 7](07_mixed_precision.ipynb) and [lesson 9](09_child_tuning.ipynb)",
    minutes=(1, 14, 27),
)

# %% [markdown]
# ## The script
#
# Save it as `train.py`, then `torchrun --nproc-per-node 4 train.py`. It trains the same Llama on the same
# samples in a loop, first with the mean of the ranks' mean losses, then weighted by labels; and by `Trainer`.
#
# ```python
# import torch
# import torch.distributed as dist
# from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments
#
# from fsdp_utils import shard
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# rank, world = dist.get_rank(), dist.get_world_size()
# sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4}
# ids = torch.randint(64, (3 * world, 4, 24), generator=torch.Generator().manual_seed(1))    # 4 a rank and step
# begins = torch.randint(1, 23, (3 * world, 1, 1), generator=torch.Generator().manual_seed(2))
# labels = ids.masked_fill(torch.arange(24) < begins, -100)    # answers differ in length; -100: not in the loss
#
#
# def build():
#     torch.manual_seed(0)                                        # the same weights on every rank
#     return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))    # or from_pretrained(...)
#
#
# def loop(weighted):
#     model, losses = shard(build().to(device)), []               # fully_shard on each block, then on the model
#     optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
#     for step in range(3):
#         x, y = (t[world * step + rank].to(device) for t in (ids, labels))    # other samples on each rank
#         count = (y[:, 1:] != -100).sum()
#         dist.all_reduce(count)                                  # the labels of all ranks
#         loss = model(input_ids=x, labels=y, num_items_in_batch=count if weighted else None).loss
#         loss = loss if weighted else loss / world               # its part of the loss of all ranks
#         (loss * world).backward()                               # FSDP takes the mean over the ranks
#         torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
#         optimizer.step()
#         optimizer.zero_grad()
#         dist.all_reduce(loss := loss.detach())
#         losses.append(loss.item())
#     return losses, [p.to_local() for p in model.parameters()]
#
#
# def trainer():
#     args = TrainingArguments("out", fsdp=True, use_cpu=device == "cpu", max_steps=3, per_device_train_batch_size=4,
#                              learning_rate=1e-3, lr_scheduler_type="constant", logging_steps=1, disable_tqdm=True,
#                              train_sampling_strategy="sequential", save_strategy="no", report_to=[])
#     rows = [{"input_ids": x, "labels": y} for x, y in zip(ids.flatten(0, 1), labels.flatten(0, 1))]
#     trainer = Trainer(build(), args, train_dataset=rows)
#     trainer.remove_callback(PrinterCallback)
#     trainer.train()
#     held = [getattr(p, "_local_tensor", p) for p in trainer.model_wrapped.parameters()]
#     return [log["loss"] for log in trainer.state.log_history if "loss" in log], held
#
#
# ways = {"loop, mean of means": lambda: loop(False), "loop, by labels": lambda: loop(True), "Trainer": trainer}
# for name, way in ways.items():
#     losses, held = way()
#     if rank == 0:
#         kib = sum(t.nbytes for t in held) / 2**10
#         print(f"{name:19}: losses {' '.join(f'{loss:.3f}' for loss in losses)}, {kib:.0f} KiB of weights on a rank")
# dist.destroy_process_group()
# ```
# ```text
# loop, mean of means: losses 4.160 4.181 4.172, 164 KiB of weights on a rank
# loop, by labels    : losses 4.163 4.187 4.163, 164 KiB of weights on a rank
# Trainer            : losses 4.163 4.187 4.163, 658 KiB of weights on a rank
# ```
#
# This output is from CPU ranks. Two surprises are in it. The first loop is *not* `Trainer`'s: its ranks have
# unequal numbers of labels, and a mean of means weighs them wrongly. And on CPU ranks `Trainer(fsdp=True)`
# trains with DDP without a word: each rank holds the whole model, 658 KiB instead of 164. The lesson explains
# both, and looks for more.
#
# ## Which one?
#
# | | a loop of your own | `fsdp_utils.train` | `Trainer` |
# |:--|:--|:--|:--|
# | losses, gradient norms, bytes at rest | equal | equal | equal |
# | a checkpoint of LoRA holds | what you choose | adapters and base | adapters |
# | started again, it resumes | if you write that | by itself, on another number of ranks too | if you pass `resume_from_checkpoint` |
# | with bf16, gradients are added up in | what you choose | float32 | bf16, or as you replace it |
# | on CPU ranks | FSDP2 | FSDP2 | DDP |
# | you maintain | the loop | a module with model and data | arguments and callbacks |
#
# The rest of the lesson measures this table, save the rows on resuming and on what you maintain, on a small
# Llama, with all parameters and with [LoRA](09_child_tuning.ipynb). A folded cell has taught it on rank 0 to
# write dates in digits, and saved it as the folder `base`, in the format of a model on the hub. The new task
# is the way back: `1998-03-07>7 march 1998`.

# %% jupyter={"source_hidden": true}
import os
import shutil
import tempfile
from pathlib import Path

from fsdp_utils.lessons.tables import Table
from fsdp_utils.notebook import ranks

home, folder = Path.cwd(), Path(tempfile.mkdtemp())
os.chdir(folder)                                # the ranks find finetune.py and base/ there
os.environ["OMP_NUM_THREADS"] = "1"             # as torchrun sets it
ranks.start(preload=["transformers.models.llama.modeling_llama", "transformers.trainer", "peft"])

# %%
# %%writefile finetune.py
import torch
from dataclasses import replace
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from fsdp_utils.lessons import tasks

BASE = "base"                                   # a folder, or the name of a model on the hub


def full():
    return AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)


def lora():
    torch.manual_seed(0)                        # the same adapters on every rank
    return get_peft_model(full(), LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))


def encode(pairs):                              # ids and labels, i64[dates, longest]
    rows = [[tasks.ID_OF[c] for c in f"{digits}>{words}"] + [tasks.END] for words, digits in pairs]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, tasks.PAD)
    labels = ids.masked_fill(ids == tasks.PAD, -100)         # -100: not in the loss
    labels[:, :11] = -100                                    # the question, `1998-03-07>`
    return {"input_ids": ids, "labels": labels}


def task(build):                                # what fsdp_utils.train asks for: samples, and the model
    train, test = map(encode, tasks.date_pairs())
    return replace(tasks.dates_llama(), build=build, train=train, test=test)


def full_task():
    return task(full)


def lora_task():
    return task(lora)


# %%
# %%ranks
import contextlib
import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from transformers import PrinterCallback, Trainer, TrainingArguments

from fsdp_utils import shard
from fsdp_utils.lessons import tasks
from fsdp_utils.lessons.probe import Probe
from fsdp_utils.train import DataConfig, OptimConfig, ParallelConfig, TrainConfig, rows_at
from fsdp_utils.train import train as train_program

rank, world = dist.get_rank(), dist.get_world_size()
BATCH, STEPS, LR, BETAS, CLIP = 24, 10, 3e-3, (0.9, 0.95), 1.0

# %% jupyter={"source_hidden": true}
# %%ranks
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")    # peft reads a renamed attribute
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
if rank == 0:
    base, dates = tasks.dates_llama().build(), tasks.dates_llama()
    del base.model.layers[3:]
    base.config.num_hidden_layers = 3
    optimizer = torch.optim.AdamW(base.parameters(), lr=3e-3)
    for step in range(100):
        base(**dates.batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    base.save_pretrained("base")
dist.barrier()                                  # the others wait for the folder
sys.path.insert(0, "")                          # finetune.py is in the working directory
import finetune

data = finetune.task(None).train
program_log = Path("program.log").open("a")     # noqa: SIM115  what fsdp_utils.train would print
order = rows_at(0, BATCH * 16, len(data["labels"]), seed=0)      # i64[384]: the samples of 16 steps


def share(step, parts=1):
    """This rank's samples of a step, in so many micro-batches: a list of dicts of tensors."""
    rows = order[BATCH * step : BATCH * (step + 1)].view(parts, world, -1)[:, rank]
    return [{name: tensor[part].to(device) for name, tensor in data.items()} for part in rows]

# %% [markdown]
# ## One curve
#
# **Way 1, your loop.** A Llama of transformers divides the sum of its losses by `num_items_in_batch`. Without
# that argument it divides by the labels of its own batch, and FSDP's mean over the ranks is a mean of means.
# So count the labels of all ranks first. Each rank's loss is then its part of the mean over all labels. The
# parts have to be added up, and FSDP averages: multiply by the number of ranks. `share(step)` (folded)
# returns this rank's samples of a step, as a list of micro-batches: one here, two in turn 2.

# %%
# %%ranks
def total_labels(parts):
    """The labels of these micro-batches on all ranks together."""
    count = sum((part["labels"][:, 1:] != -100).sum() for part in parts)
    dist.all_reduce(count)
    return count


def plain_step(model, optimizer, parts):
    (batch,) = parts                                            # one micro-batch
    loss = model(**batch, num_items_in_batch=total_labels(parts)).loss      # a sum, divided by that count
    (loss * world).backward()                                   # FSDP takes the mean over the ranks
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)         # of all ranks' shards together
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach()
    dist.all_reduce(loss)                                       # only for the curve
    return loss.item(), norm.full_tensor().item()


def adamw(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=LR, betas=BETAS, weight_decay=0.0)


def by_hand(model, steps=STEPS, policy=None):
    shard(model.to(device), mp_policy=policy)                   # fully_shard on each block, then on the model
    optimizer = adamw(model)
    return [plain_step(model, optimizer, share(step)) for step in range(steps)]


# %% [markdown]
# **Way 2, `fsdp_utils.train`.** From a terminal: `torchrun --nproc-per-node 4 -m fsdp_utils.train --out
# runs/lora --data.source finetune:lora_task --optim.lr 0.003 --optim.decay none --optim.weight_decay 0
# --steps 10`. Here its function, with the same settings, runs on the ranks that are there already.
# (`patch.object` hands it a model that we hold too, to count bytes.)

# %%
# %%ranks
def by_program(how, model, steps=STEPS, precision="fp32", out="program"):
    optim = OptimConfig(lr=LR, betas=BETAS, weight_decay=0.0, decay="none", clip=CLIP)
    source = DataConfig(source=f"finetune:{how}_task", batch_size=BATCH)
    place = ParallelConfig(precision=precision, device="auto" if on_gpu else "cpu")
    config = TrainConfig(out=f"{out}-{how}", steps=steps, data=source, optim=optim, parallel=place)
    with patch.object(finetune, how, lambda: model), contextlib.redirect_stderr(program_log):
        train_program(config)                   # builds its model by finetune.full or finetune.lora
    dist.barrier()                              # rank 0 has written the file
    lines = [json.loads(line) for line in Path(config.out, "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["norm"]) for line in lines if "loss" in line]


# %% [markdown]
# **Way 3, `Trainer`.** On GPUs under torchrun, one setting switches FSDP2 on: `fsdp=True`. It is passed to
# Accelerate, which looks at the type of the devices first (`AcceleratorState.__init__` in
# `accelerate/state.py`), and for CPU ranks it does not switch FSDP on. **No message says so, and the ranks
# train with DDP.** So a test of your training on CPUs tests DDP. Look at `trainer.is_fsdp_enabled`, not at
# your settings. `TrainerOnCpus` (folded) makes the few assignments of the skipped branch, for this lesson
# alone: on CPU ranks, all numbers of `Trainer` below are with this patch.

# %% jupyter={"source_hidden": true}
# %%ranks
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def forget():
    """Clear what the last Accelerator has left in this process: its classes and environment variables."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        os.environ.pop(name, None)


class TrainerOnCpus(Trainer):
    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        if state.distributed_type == DistributedType.MULTI_CPU:         # on GPUs there is nothing to do
            plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            if state.mixed_precision != "no":
                plugin.set_mixed_precision(state.mixed_precision)
            state.fsdp_plugin, self.is_fsdp_enabled = plugin, True
            state.distributed_type = PartialState().distributed_type = DistributedType.FSDP


# %%
# %%ranks
def by_trainer(model, steps=STEPS, parts=1, policy=None, **more):
    forget()                                                    # folded: Accelerate keeps state in the process
    args = TrainingArguments(
        fsdp=True, fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"},       # the latter for checkpoints
        use_cpu=not on_gpu, max_steps=steps, per_device_train_batch_size=BATCH // world // parts,
        gradient_accumulation_steps=parts, train_sampling_strategy="sequential",        # not shuffled
        learning_rate=LR, lr_scheduler_type="constant", adam_beta1=BETAS[0], adam_beta2=BETAS[1],
        max_grad_norm=CLIP, logging_steps=1, report_to=[], disable_tqdm=True,
        **{"save_strategy": "no", **more},
    )                                                           # fmt: skip
    rows = [{name: tensor[row] for name, tensor in data.items()} for row in order.tolist()]
    trainer = TrainerOnCpus(model=model, args=args, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)                    # it prints what log_history holds
    if policy is not None:                                      # for *Precision*, below
        trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = policy
    trainer.train()
    return [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]


# %% [markdown]
# Now all six runs: three ways, with all parameters and with LoRA. A `Probe` watches each, whoever wrote its
# loop, and counts bytes in its first four steps.

# %%
# %%ranks
runs = {}
for how in ("full", "lora"):
    saves = {"save_strategy": "steps", "save_steps": STEPS, "output_dir": f"trainer-{how}"}
    trains = {"a loop of your own": by_hand, "fsdp_utils.train": partial(by_program, how)}
    trains["Trainer"] = partial(by_trainer, **saves)
    for way, train in trains.items():
        model = getattr(finetune, how)()
        with Probe(model) as probe:
            runs[way, how] = train(model), probe

# %% jupyter={"source_hidden": true}
curves = ranks.get("{key: curve for key, (curve, _) in runs.items()}")[0]
ways = [*layers]
fig, panels = plots.figure(2, width=9.0, height=2.8)
looks = [(plots.FAINT, 9, "-"), (plots.RANK_COLORS[0], 2, "-"), (plots.RANK_COLORS[5], 2, ":")]
for axes, (how, title) in zip(panels, {"full": "all parameters", "lora": "LoRA"}.items()):
    for way, (color, width, line) in zip(ways, looks):
        losses = [loss for loss, _ in curves[way, how]]
        axes.plot(range(1, len(losses) + 1), losses, line, label=way, color=color, linewidth=width)
    axes.set(title=title, xlabel="step", ylabel="loss", ylim=(0, 8.5))
panels[0].legend(frameon=False)
plots.show(fig, alt="Losses of the three ways over ten steps lie on each other, all parameters and LoRA.")

# %% jupyter={"source_hidden": true} tags=["check"]
for (way, how), curve in curves.items():
    for found, mine in zip(curve, curves["a loop of your own", how], strict=True):
        assert abs(found[0] - mine[0]) < 1e-4 and abs(found[1] - mine[1]) < 2e-3, (way, how)  # noqa: PT018

# %% [markdown]
# In each panel three curves lie on each other, within 0.0001 at every step, and so do the norms of the
# gradients before clipping, within 0.002. From the same weights and in the same precision this takes four
# equal things: samples and their order, the denominator of the loss, AdamW's settings with the schedule, and
# clipping by the norm over all ranks. Left out, each program takes its own default. From the installed
# versions:

# %%
# %%ranks
import dataclasses
import inspect

of_trainer = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
of_adamw = {name: p.default for name, p in inspect.signature(torch.optim.AdamW).parameters.items()}
ours = OptimConfig()
defaults = [
    ["learning rate", of_adamw["lr"], ours.lr, of_trainer["learning_rate"]],
    ["its schedule", "none", ours.decay, str(of_trainer["lr_scheduler_type"])],
    ["second beta", of_adamw["betas"][1], ours.betas[1], of_trainer["adam_beta2"]],
    ["weight decay", of_adamw["weight_decay"], ours.weight_decay, of_trainer["weight_decay"]],
    ["largest norm", "not clipped", ours.clip, of_trainer["max_grad_norm"]],
    ["order of the samples", "yours", "by the seed", of_trainer["train_sampling_strategy"]],
]

# %%
Table(["if left out", *ways], ranks.get("defaults")[0])

# %% [markdown]
# And once weight decay is on, `Trainer` exempts norms and biases; the other two don't.
#
# ## What a rank holds and sends

# %% tags=["held"]
rows = ranks.get("{key: [n / 2**10 for n in probe.row()] for key, (_, probe) in runs.items()}")[0]
kib = {f"{way}, {how}": rows[way, how] for how in ("full", "lora") for way in ways}
at_rest = ("parameters", "gradients", "AdamW's averages")
plots.amounts({
    "at rest": {run: dict(zip(at_rest, row)) for run, row in kib.items()},
    "in one step": {run: {"gathered": row[3], "reduced": row[4]} for run, row in kib.items()},
    "full at once": {run: {"full parameters": row[5]} for run, row in kib.items()},
}, unit="KiB", alt="What rank 0 holds, gathers and reduces, and has in full at once, in six runs.")

# %% jupyter={"source_hidden": true} tags=["check"]
for way in ways:
    full, lora = rows[way, "full"], rows[way, "lora"]
    assert lora[4] < 0.05 * full[4] < lora[3] < 1.1 * full[3]
    assert full[:3] == rows[ways[0], "full"][:3] and lora[:3] == rows[ways[0], "lora"][:3]  # noqa: PT018
assert 1 < rows["Trainer", "full"][3] / rows[ways[0], "full"][3] < 1.03

# %% [markdown]
# Bytes of rank 0. **Full at once** are the most full parameters at one moment, without the buffers of the
# all-gathers. At rest the three ways are equal. `Trainer` gathers 1% more and has less in full at once,
# because Accelerate makes other units: `shard` leaves embedding, last norm and head in the model's own unit,
# which stays gathered until backward ends, and Accelerate makes two units: the embedding, and norm with head
# (one, if embedding and head share their weights). With LoRA, gradients, averages and reduced bytes shrink to
# 4%, and the gathered bytes do not, as in [lesson 9](09_child_tuning.ipynb).
#
# ## Your turn 1 · Train adapters only
#
# PEFT froze the base model for you. Here its work is undone: every parameter of the model that you get
# requires a gradient. Write `prepare(model)`: it shards the model by `shard(model)`, so that only the
# adapters are trained, and returns the optimizer that `adamw(model)` would make. Adapters have `lora_` in
# their names. The turn trains four steps with clipping, and compares with PEFT's own freezing.

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import NotYet, exactly, turn

COUNT = sum(p.requires_grad for p in finetune.lora().parameters())


@turn(1, {
    "the model is sharded": exactly(True, "`prepare` has not sharded the model: call `shard(model)`."),
    "tensors that require a gradient": exactly(
        COUNT, less="An adapter is frozen: they are the parameters with `lora_` in their names.",
        more="The base model requires gradients, too. FSDP2 computes and reduces them, and clipping counts them, "
        "whatever the optimizer was given: set `requires_grad_` by name.",
    ),
    "of them, in the optimizer": exactly(
        COUNT, less="The optimizer lacks adapters of the sharded model: `shard` replaces the parameters, so make "
        "it afterwards, of all adapters."
    ),
    "lr, betas and weight decay of `adamw`": exactly(True, "`adamw` has `lr=LR`, `betas=BETAS` and `weight_decay=0.0`."),
    "losses as with PEFT's own freezing": exactly(True, "The losses differ from those of the same adapters above."),
})
def score_adapters(prepare):
    model = finetune.lora().to(device).requires_grad_(True)
    optimizer = prepare(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise NotYet("`prepare` returns the optimizer.")
    trained = [p for p in model.parameters() if p.requires_grad]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [isinstance(model, FSDPModule), len(trained), sum(id(p) in held for p in trained)]
    everyone = [None] * world
    dist.all_gather_object(everyone, found)
    right = None
    if all(one == [True, COUNT, COUNT] for one in everyone):    # else the steps would hang, or mean nothing
        losses = [plain_step(model, optimizer, share(step))[0] for step in range(4)]
        right = all(abs(mine - of[0]) < 1e-4 for mine, of in zip(losses, runs["a loop of your own", "lora"][0]))
    of_adamw = {"lr": LR, "betas": BETAS, "weight_decay": 0.0}
    same = all(tuple(group[key]) == value if key == "betas" else group[key] == value
               for group in optimizer.param_groups for key, value in of_adamw.items())
    names = ("the model is sharded", "tensors that require a gradient", "of them, in the optimizer")
    return {**dict(zip(names, found)), "lr, betas and weight decay of `adamw`": same, "losses as with PEFT's own freezing": right}

# %%
# %%turn 1
def prepare(model):                             # not sharded; everything requires a gradient
    return None                                 # your lines here: shard it, and return the optimizer


# %% tags=["solution"] turn=1
def prepare(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    shard(model)
    return adamw(model)                         # of the parameters that require a gradient

# %% tags=["right"] turn=1
def prepare(model):                             # frozen after sharding; a fused optimizer
    shard(model)
    [p.requires_grad_("lora_" in name) for name, p in model.named_parameters()]
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], LR, BETAS, weight_decay=0, fused=True)

# %% tags=["right"] turn=1
def prepare(model):                             # the optimizer has all parameters: no gradient, no step
    [p.requires_grad_("lora_" in name) for name, p in model.named_parameters()]
    return torch.optim.AdamW(shard(model).parameters(), lr=LR, betas=BETAS, weight_decay=0.0)

# %% tags=["right"] turn=1
def prepare(model):                             # peft's own freezing; parameters with names
    model.base_model._mark_only_adapters_as_trainable(model)
    shard(model)
    named = [(name, p) for name, p in model.named_parameters() if "lora_" in name]
    return torch.optim.AdamW(named, lr=LR, betas=BETAS, weight_decay=0.0)

# %% tags=["wrong"] turn=1 says="The base model requires gradients, too"
def prepare(model):                             # the optimizer leaves the base out, and FSDP does not know
    shard(model)
    return torch.optim.AdamW([p for name, p in model.named_parameters() if "lora_" in name], lr=LR, betas=BETAS)

# %% tags=["wrong"] turn=1 says="make it afterwards"
def prepare(model):                             # the optimizer before sharding
    [p.requires_grad_("lora_" in name) for name, p in model.named_parameters()]
    optimizer = adamw(model)
    shard(model)
    return optimizer

# %% tags=["wrong"] turn=1 says="weight_decay=0.0"
def prepare(model):                             # torch's default weight decay
    [p.requires_grad_("lora_" in name) for name, p in model.named_parameters()]
    shard(model)
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, betas=BETAS)

# %% tags=["wrong"] turn=1 says="has not sharded the model"
def prepare(model):
    [p.requires_grad_("lora_" in name) for name, p in model.named_parameters()]
    return adamw(model)

# %% [markdown]
# ## Precision
#
# All three are asked for bf16: the loop by the policy of [lesson 7](07_mixed_precision.ipynb), the program by
# `precision="bf16"`, `Trainer` by `bf16=True`. A fourth run gives the loop's policy to `Trainer`, by one
# assignment between making it and `train()`: `trainer.accelerator.state.fsdp_plugin.mixed_precision_policy =
# policy`.

# %%
# %%ranks
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
asked = {
    "a loop of your own": partial(by_hand, steps=4, policy=policy),
    "fsdp_utils.train": partial(by_program, "full", steps=4, precision="bf16", out="half"),
    "Trainer": partial(by_trainer, steps=4, bf16=True),
    "Trainer, with the loop's policy": partial(by_trainer, steps=4, bf16=True, policy=policy),
}
precision = []
for way, train in asked.items():
    whole = runs[way.partition(",")[0], "full"][1]                  # the same in float32: 4 bytes an element
    with Probe(model := finetune.full()) as probe:
        train(model)
    sent = [round(4 * probe.sent(kind) / whole.sent(kind), 1) for kind in ("all_gather", "reduce_scatter")]
    precision.append([way, str(next(model.parameters()).dtype).removeprefix("torch."), *sent])

# %%
precision = ranks.get("precision")[0]
assert [row[3] for row in precision] == [4, 4, 2, 4]
Table(["asked for bf16", "parameters at rest", "bytes gathered for one number", "bytes reduced for one gradient"], precision)

# %% [markdown]
# All keep the parameters in float32, in which `full()` loads them, and gather them in bf16; of a bf16 model,
# Accelerate makes the trained parameters float32, and your loop none. But Accelerate sets `reduce_dtype` to
# bf16 as well, so `Trainer` adds up the gradients of all ranks in bf16. That halves the bytes, and with many
# ranks it loses digits. Transformers 5.23 has no setting for it.
#
# ## Checkpoints of LoRA
#
# `fsdp_utils.train` and `Trainer` have saved their last step. Your loop needs torch's DCP, whose
# `ignore_frozen_params` leaves out what is not trained. `tensor_kib` adds up the tensors in a checkpoint's
# files.

# %%
# %%ranks
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.utils._pytree import tree_leaves


def tensor_kib(out):
    """KiB of the tensors in a checkpoint: DCP's files, which have metadata, and those of Trainer for PEFT."""
    total = 0
    for path in Path(out).rglob(".metadata"):
        for entry in FileSystemReader(path.parent).read_metadata().state_dict_metadata.values():
            total += entry.size.numel() * entry.properties.dtype.itemsize if hasattr(entry, "size") else 0
    whole = [load_file(path) for path in Path(out).rglob("*.safetensors")]
    whole += [torch.load(path) for path in Path(out).rglob("optimizer.bin")]
    total += sum(leaf.nbytes for leaf in tree_leaves(whole) if torch.is_tensor(leaf))
    return round(total / 2**10)


for how in ("full", "lora"):
    probe = runs["a loop of your own", how][1]                  # holds the model and the optimizer of the run
    options = StateDictOptions(ignore_frozen_params=True)
    weights, moments = get_state_dict(probe.model, probe.optimizer, options=options)
    dcp.save({"model": weights, "optimizer": moments, "step": STEPS}, checkpoint_id=f"loop-{how}")
saved = [[way, *(tensor_kib(f"{out}-{how}") for how in ("full", "lora"))]
         for way, out in zip(("a loop of your own", "fsdp_utils.train", "Trainer"), ("loop", "program", "trainer"))]

# %%
saved = ranks.get("saved")[0]
assert saved[1][2] > 5 * saved[0][2] == 5 * saved[2][2]
Table(["saved by", "all parameters, KiB", "LoRA, KiB"], saved)

# %% [markdown]
# Your loop and `Trainer` save the adapters and AdamW's two averages. `fsdp_utils.train` saves the frozen
# base, too: such a checkpoint needs no other file, and is at least as large as the model. For `Trainer`, set
# `SHARDED_STATE_DICT` as above: its default, `FULL_STATE_DICT`, gathers everything on rank 0 ([lesson
# 3](03_full_state_dict.ipynb)).
#
# To hand an adapter to others in PEFT's format, call `full_tensor()` on each tensor of
# `peft.get_peft_model_state_dict(model)`, on every rank, and let rank 0 write them; or use this library's
# `export_safetensors(..., adapter_only=True)` ([recipes](../book/trainers.md)).
#
# ## Your turn 2 · Accumulate as Trainer does
#
# Write `accumulate(model, parts)`. It gets a list of this rank's micro-batches, runs forward and backward on
# each, and returns this rank's part of the loss: a tensor without gradient, such that the parts of all ranks
# add up to the mean over all labels of the step. The gradients must be those of the same mean, and they must
# be reduced once. `Trainer` has trained on the same two micro-batches a step, for comparison.
#
# <details><summary>Hint</summary>
#
# `total_labels(parts)` counts over micro-batches and ranks. `model.set_requires_gradient_sync(False)` makes
# the next backward keep its gradients on this rank, until it is set to True again.
#
# </details>

# %% tags=["accumulate"] jupyter={"source_hidden": true}
# %%ranks
with Probe(model := finetune.full()) as accumulated:
    trainers = by_trainer(model, 4, parts=2)
assert max(abs(a[0] - b[0]) for a, b in zip(trainers, runs["Trainer", "full"][0])) < 1e-4
ONCE = accumulated.sent("reduce_scatter") / 2**10


@turn(2, {
    "loss of step 1, away from Trainer's": exactly(
        0, "The parts do not add up to the mean over all labels: divide by the labels of all micro-batches on all "
        "ranks."
    ),
    "norm of step 1, divided by Trainer's": exactly(
        1, less="The gradient is too small: FSDP divides the sum of the ranks' gradients by the number of ranks.",
        more="The gradient is too large, or each rank has one of its own: what does FSDP do to the ranks' gradients?",
    ),
    "losses of steps 2 to 4 as Trainer's": exactly(True, "The steps after the first one differ."),
    "KiB reduced in a step": exactly(
        ONCE, less="Nothing is reduced: each rank would step with its own gradients.",
        more="Each micro-batch reduces all gradients: only the last one has to.",
    ),
})
def score_accumulate(accumulate):
    model = shard(finetune.full().to(device))
    optimizer, curve = adamw(model), []
    with Probe(model) as probe:
        for step in range(4):
            loss = torch.as_tensor(accumulate(model, share(step, parts=2)), dtype=torch.float32)
            loss = loss.to(device).detach().clone()
            if all(p.grad is None for p in model.parameters()):
                return {"KiB reduced in a step": 0}
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).full_tensor().item()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss)
            curve.append((loss.item(), norm))
    return {
        "loss of step 1, away from Trainer's": round(abs(curve[0][0] - trainers[0][0]), 3),
        "norm of step 1, divided by Trainer's": round(curve[0][1] / trainers[0][1], 3),
        "losses of steps 2 to 4 as Trainer's": all(abs(a[0] - b[0]) < 1e-3 for a, b in zip(curve[1:], trainers[1:])),
        "KiB reduced in a step": probe.sent("reduce_scatter") / 2**10,
    }

# %%
# %%turn 2
def accumulate(model, parts):
    return None                                 # your lines here


# %% tags=["solution"] turn=2
def accumulate(model, parts):
    labels, mine = total_labels(parts), 0.0
    for part in parts:
        model.set_requires_gradient_sync(part is parts[-1])
        loss = model(**part, num_items_in_batch=labels).loss
        (loss * world).backward()
        mine += loss.detach()
    return mine

# %% tags=["right"] turn=2
def accumulate(model, parts):                   # the gradients are multiplied at the end; a float
    labels, losses = total_labels(parts), []
    for number, part in enumerate(parts, 1):
        model.set_requires_gradient_sync(number == len(parts))
        losses.append(model(**part, num_items_in_batch=labels).loss)
        losses[-1].backward()
    for parameter in model.parameters():
        parameter.grad *= world
    return sum(loss.item() for loss in losses)

# %% tags=["right"] turn=2
from torch.nn.functional import cross_entropy

def accumulate(model, parts):                   # the loss by hand
    labels, mine = total_labels(parts).item(), []
    for part in parts:
        model.set_requires_gradient_sync(part is parts[-1])
        logits = model(part["input_ids"]).logits[:, :-1]
        total = cross_entropy(logits.flatten(0, 1), part["labels"][:, 1:].flatten(), reduction="sum")
        (total * world / labels).backward()
        mine.append(total.detach() / labels)
    return torch.stack(mine).sum()

# %% tags=["right"] turn=2
from torch.distributed import _functional_collectives as functional

def accumulate(model, parts):                   # each own mean, weighted by its labels
    mine = torch.tensor([(part["labels"][:, 1:] != -100).sum() for part in parts], device=device)
    weights = mine / functional.all_reduce(mine.sum(), "sum", dist.group.WORLD)
    total = torch.zeros((), device=device)
    for part, weight in zip(parts, weights):
        model.set_requires_gradient_sync(part is parts[-1])
        loss = model(**part).loss * weight
        (loss * world).backward()
        total += loss.detach()
    return total

# %% tags=["wrong"] turn=2 says="do not add up to the mean over all labels"
def accumulate(model, parts):                   # the mean of the means
    mine = 0.0
    for part in parts:
        model.set_requires_gradient_sync(part is parts[-1])
        loss = model(**part).loss / len(parts)
        loss.backward()
        mine += loss.detach() / world
    return mine

# %% tags=["wrong"] turn=2 says="FSDP divides the sum of the ranks' gradients"
def accumulate(model, parts):                   # without the number of ranks
    labels, mine = total_labels(parts), 0.0
    for part in parts:
        model.set_requires_gradient_sync(part is parts[-1])
        loss = model(**part, num_items_in_batch=labels).loss
        loss.backward()
        mine += loss.detach()
    return mine

# %% tags=["wrong"] turn=2 says="only the last one has to"
def accumulate(model, parts):                   # reduced at each micro-batch
    labels, mine = total_labels(parts), []
    for part in parts:
        mine.append(model(**part, num_items_in_batch=labels).loss)
        (mine[-1] * world).backward()
    return sum(mine).detach()

# %% tags=["wrong"] turn=2 says="Nothing is reduced"
def accumulate(model, parts):                   # each rank would step with its own gradients
    model.set_requires_gradient_sync(False)
    for part in parts:
        loss = model(**part, num_items_in_batch=total_labels(parts)).loss
        (loss * world).backward()
    return loss.detach()

# %% [markdown]
# `Trainer` counts the same labels (`average_tokens_across_devices` is True by default) and multiplies by the
# number of ranks, as you did. Its losses with two micro-batches are those with one. Leave out `* world`, and
# the losses hardly change, because clipping and AdamW both cancel a factor in all gradients. SGD without
# clipping would not. The norm shows it: **compare norms, too.**
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | `fsdp=True`, and each rank holds the whole model | Accelerate does not switch FSDP on for this type of device, and says nothing | look at `trainer.is_fsdp_enabled` |
# | `AcceleratorState has already been initialized` | Accelerate keeps its state in the process, and the last run had another precision | a new process for each run |
# | losses differ from step 1 on | other samples (`Trainer` shuffles by its own seed), or a mean of means | `train_sampling_strategy="sequential"`; weigh by labels |
# | losses differ a little from step 2 or 3 on | weight decay on norms, betas, or a schedule that was left out | set them all, see the table of defaults |
# | with dropout, a model learns less well under `activation_checkpointing` of `fsdp_config` | Accelerate 1.15 recomputes with `preserve_rng_state=False`, so backward drops other numbers than forward | `activation_checkpointing=True` of `TrainingArguments` itself (transformers warns that this adds an all-gather in backward; without dropout keep that of `fsdp_config`) |
#
# ## The rule
#
# Choose by who maintains the step: `Trainer` for its datasets and callbacks, `fsdp_utils.train` for resuming
# by itself ([lesson 10](10_end_to_end.ipynb) kills it), your own loop for an unusual step. Then look at what
# a checkpoint holds. Compare losses *and* gradient norms of a few steps before you trust a change of program.

# %% jupyter={"source_hidden": true}
os.chdir(home)
shutil.rmtree(folder)

# %% [markdown]
# [← lesson 16](16_two_dimensions.ipynb) · [lesson 18 →](18_beyond_forward_and_backward.ipynb)
