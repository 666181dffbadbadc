# %% [markdown]
# # 17 · Fine-tune a real model
#
# You have a model, your own data and several GPUs. Who should run the training steps: a loop of your own,
# transformers' `Trainer`, or this library's training program, `fsdp_utils.train`? **Take `Trainer` if you work with
# transformers' datasets, metrics and callbacks; `fsdp_utils.train` if the run has to go on by itself after it was
# interrupted; your own loop if a step is more than one loss.** Losses don't decide it, nor does the memory between
# steps: all three shard the model by torch's `fully_shard` (FSDP2), so with the same settings they train the same.
# But each has defaults and omissions of which no message tells you. This lesson finds them.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

layers = {
    "your own loop": ["the loop", "your loop", "you, by shard(model)", "you, by torch's DCP"],
    "fsdp_utils.train": ["settings", "the program", "the program", "the program"],
    "Trainer": ["TrainingArguments", "Trainer", "Accelerate", "Trainer and Accelerate"],
}
jobs = ["you write", "runs each step", "calls fully_shard", "saves checkpoints"]
plots.layers(
    {way: dict(zip(jobs, has)) for way, has in layers.items()},
    above=["the same weights, samples, AdamW and clipping"], below=["torch's fully_shard (FSDP2)"],
    alt="Three programs between what they are given and torch's fully_shard, which all three call.",
)

# %% [markdown]
# In this drawing, the grey bands are what the three have in common: what goes in, and what shards the model. Each
# row between them is a job, and each column says who does it. Accelerate is the library under `Trainer` that
# decides how to distribute a model; DCP is `torch.distributed.checkpoint`, which saves each rank's shards.

# %% tags=["card"]
lesson.card(
    17,
    learn="choose a training program, and find where three of them differ although their losses do not",
    needs="[lesson 7](07_mixed_precision.ipynb) and [lesson 9](09_child_tuning.ipynb)",
    minutes=(1, 20, 25),
)

# %% [markdown]
# ## The script
#
# It trains the same small Llama for three steps in three ways: by a loop, by the same loop with one argument more,
# and by `Trainer` with `fsdp=True`, its switch for FSDP2. (`fsdp_utils.train` has a command of its own, shown
# below.) Each sample is a question and its answer, and only the answer's tokens count in the loss: the others have
# the label -100. Look at the line that computes `loss`, in which the two loops differ. Save it as `train.py`, then
# run `torchrun --nproc-per-node 4 train.py`.
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
#
# def build():
#     torch.manual_seed(0)                                          # the same weights on every rank
#     sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4}
#     return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))  # or from_pretrained(...)
#
# torch.manual_seed(1)
# ids = torch.randint(64, (3 * world, 24))                          # your data: a sample for each step and rank
# labels = ids.masked_fill(torch.arange(24) < torch.randint(1, 23, (3 * world, 1)), -100)     # -100: no loss here
#
# def loop(by_labels):
#     model, losses = shard(build().to(device)), []                 # fully_shard on each block, then on the model
#     optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
#     for step in range(3):
#         x, y = (rows[world * step + rank, None].to(device) for rows in (ids, labels))
#         dist.all_reduce(count := (y[:, 1:] != -100).sum())        # the answers' tokens on all ranks
#         loss = model(input_ids=x, labels=y, num_items_in_batch=count / world if by_labels else None).loss
#         loss.backward()                                           # FSDP averages the gradients over the ranks
#         torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
#         optimizer.step()
#         optimizer.zero_grad()
#         dist.all_reduce(mean := loss.detach() / world)
#         losses.append(mean.item())
#     return losses, model
#
# def trainer():
#     args = TrainingArguments("out", fsdp=True, use_cpu=device == "cpu", max_steps=3, per_device_train_batch_size=1,
#                              learning_rate=1e-3, lr_scheduler_type="constant", logging_steps=1, disable_tqdm=True,
#                              train_sampling_strategy="sequential", save_strategy="no", report_to=[])
#     trainer = Trainer(build(), args, train_dataset=[{"input_ids": x, "labels": y} for x, y in zip(ids, labels)])
#     trainer.remove_callback(PrinterCallback)                      # it prints what log_history holds
#     trainer.train()
#     return [log["loss"] for log in trainer.state.log_history if "loss" in log], trainer.model_wrapped
#
# ways = {"own loop": lambda: loop(False), "own loop, by labels": lambda: loop(True), "Trainer": trainer}
# for name, way in ways.items():
#     losses, model = way()
#     kib = sum((p.to_local() if hasattr(p, "to_local") else p).nbytes for p in model.parameters()) / 2**10
#     if rank == 0:
#         print(f"{name:19}  losses {losses[0]:.3f} {losses[1]:.3f} {losses[2]:.3f}, {kib:.0f} KiB of weights per rank")
# dist.destroy_process_group()
# ```
# ```text
# own loop             losses 4.138 4.191 4.173, 164 KiB of weights per rank
# own loop, by labels  losses 4.122 4.192 4.171, 164 KiB of weights per rank
# Trainer              losses 4.122 4.192 4.171, 658 KiB of weights per rank
# ```
#
# This output is from CPU ranks. Both columns hold a surprise.
#
# **The losses.** The first loop differs from `Trainer` at the first step, 4.138 against 4.122, before any weight
# has changed: the two define the loss differently. In that step the four ranks have answers of 6, 2, 7 and 9
# tokens. In the first loop each rank takes the mean over its own tokens, and FSDP takes the mean of these means. So
# a token on the rank with 2 counts 4.5 times as much as one on the rank with 9. `Trainer` takes one mean, over all
# 24 tokens. So does the second loop, by `num_items_in_batch` (explained under *Way 1*), and its losses are
# `Trainer`'s.
#
# **The bytes.** A rank of either loop holds 164 KiB of weights, a quarter of the model. A rank of `Trainer` holds
# all 658, because on CPU ranks `fsdp=True` has no effect: `Trainer` trains with DDP, and doesn't tell you.
#
# ## Which one?
#
# - **`Trainer`**: you write arguments and callbacks. If your script uses `Trainer` already, `fsdp=True` and torchrun
#   are all that it takes on GPUs; `trainer.train(resume_from_checkpoint=True)` continues a run. In return you get
#   the defaults of two libraries, some of which surprise.
# - **`fsdp_utils.train`**: you write a module with a function that returns data and model; all else are settings.
#   The same command, given again, continues from the last complete checkpoint, also on another number of ranks
#   ([lesson 10](10_end_to_end.ipynb) kills it to show that). In return its step is fixed: one loss, AdamW, clipping.
# - **Your own loop**: you write the fifteen lines above, and you need them as soon as a step has two models, a
#   reward or a second optimizer. In return everything is yours to get right: what is counted, saved and resumed.
#
# The sections below measure this table:
#
# | | your own loop | `fsdp_utils.train` | `Trainer` |
# |:--|:--|:--|:--|
# | losses, gradient norms, bytes between steps | equal | equal | equal |
# | on CPU ranks it trains with | FSDP2 | FSDP2 | DDP |
# | asked for bf16, it adds up gradients in | what you choose | float32 | bf16, unless you change it |
# | a checkpoint of LoRA holds | what you choose | adapters and base | adapters |
#
# Speed isn't in it, because seconds on CPU ranks say nothing about GPUs.
#
# ## Three programs, one curve
#
# There has to be something to fine-tune: a folded cell trains a Llama of three blocks to write dates in digits
# (`7 march 1998>1998-03-07`) and saves it as the folder `base`, in the format of a model on the hub. The new task
# is the way back, `1998-03-07>7 march 1998`, whose answers differ in length.
#
# `finetune.py` holds what all three programs are given: the samples, and the model, whose parameters are either all
# trained (`full`) or frozen beneath [LoRA](09_child_tuning.ipynb) adapters (`lora`). For your own model and data
# you'd change `BASE`, `encode` and `target_modules`. Each process loads the whole model into CPU memory before it
# is sharded; where that doesn't fit, see [lesson 12](12_a_model_too_big_for_one_rank.ipynb).

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

def task(build):                                # for fsdp_utils.train: a model, samples to train and to test
    return tasks.Task(build, *map(encode, tasks.date_pairs()), predicts_next=True)

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
from fsdp_utils.train import DataConfig, OptimConfig, ParallelConfig, TrainConfig, rows_at, train as train_program

rank, world = dist.get_rank(), dist.get_world_size()
BATCH, STEPS, LR, BETAS, CLIP, SEED = 24, 10, 3e-3, (0.9, 0.95), 1.0, 16

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
order = rows_at(0, BATCH * 16, len(data["labels"]), SEED)     # i64[384]; in step 1 a mean of means is 0.6% off or more

def share(step, parts=1):
    """This rank's samples of a step, in so many micro-batches: a list of dicts of tensors."""
    rows = order[BATCH * step : BATCH * (step + 1)].view(parts, world, -1)[:, rank]
    return [{name: tensor[part].to(device) for name, tensor in data.items()} for part in rows]

# %% [markdown]
# **Way 1, your own loop.** As in the script, the line to understand is the one with `num_items_in_batch`. Given
# that number, a Llama of transformers adds up the losses of its labels and divides the sum by the number. FSDP then
# averages the gradients over the ranks, which divides once more, by the number of ranks. For the result to be the
# mean over all labels, the number must be the labels of all ranks, divided by the number of ranks. That is what
# `labels_per_rank` returns. Its argument `parts` is this rank's list of batches for one step, which the folded
# `share(step)` makes: one batch for now, two in turn 2.

# %%
# %%ranks
def labels_per_rank(parts):
    """The number of labels in these batches of a step, in the mean over the ranks."""
    count = sum((part["labels"][:, 1:] != -100).sum() for part in parts)    # nothing predicts the first token
    dist.all_reduce(count)
    return count / world

def plain_step(model, optimizer, parts):
    loss = model(**parts[0], num_items_in_batch=labels_per_rank(parts)).loss
    loss.backward()                                             # FSDP averages the gradients over the ranks
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)         # of all ranks' shards together
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(mean := loss.detach() / world)              # only for the curve
    return mean.item(), norm.full_tensor().item()

def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], LR, BETAS, weight_decay=0.0)

def by_hand(model, steps=STEPS, policy=None):
    shard(model.to(device), mp_policy=policy)                   # fully_shard on each block, then on the model
    optimizer = adamw(model)
    return [plain_step(model, optimizer, share(step)) for step in range(steps)]

# %% [markdown]
# **Way 2, `fsdp_utils.train`.** You'd start it in a terminal. `finetune:lora_task` is the function in `finetune.py`
# that returns model and samples:
#
# ```bash
# torchrun --nproc-per-node 4 -m fsdp_utils.train --out runs/lora --data.source finetune:lora_task \
#     --optim.lr 0.003 --optim.decay none --optim.weight_decay 0 --steps 10 --seed 16
# ```
#
# Here the ranks are running already, so the cell calls the same program as a function.

# %%
# %%ranks
def by_program(how, model, steps=STEPS, precision="fp32", out="program"):
    optim = OptimConfig(lr=LR, betas=BETAS, weight_decay=0.0, decay="none", clip=CLIP)
    data = DataConfig(source=f"finetune:{how}_task", batch_size=BATCH)
    place = ParallelConfig(precision=precision, device="auto" if on_gpu else "cpu")
    config = TrainConfig(f"{out}-{how}", steps=steps, data=data, optim=optim, parallel=place, seed=SEED)
    with patch.object(finetune, how, lambda: model), contextlib.redirect_stderr(program_log):
        train_program(config)                   # patched, so that it builds the model that we watch
    dist.barrier()                              # rank 0 has written the file
    lines = [json.loads(line) for line in Path(config.out, "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["norm"]) for line in lines if "loss" in line]

# %% [markdown]
# **Way 3, `Trainer`.** `fsdp=True` is a request to Accelerate, which looks at the type of the devices first. In its
# source, `accelerate/state.py`, only GPUs and other accelerators get to the branch that switches FSDP on. That is
# why the script's third row holds the whole model, and why **a test of your `Trainer` on CPU ranks tests DDP.**
# Don't trust your arguments: look at `trainer.is_fsdp_enabled`, which is False there. The folded `TrainerOnCpus`
# makes the assignments of that branch, so that in this lesson `Trainer` shards on CPU ranks, too. All its numbers
# below were measured so.

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
        if state.distributed_type == DistributedType.MULTI_CPU:
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
# Now the six runs: three programs, each with all parameters and with LoRA. A `Probe` counts the bytes of each,
# whoever wrote its loop. If the programs train the same, you see one curve in each panel of the figure.

# %%
# %%ranks
runs = {}
for how in ("full", "lora"):
    trains = {"your own loop": by_hand, "fsdp_utils.train": partial(by_program, how)}
    trains["Trainer"] = partial(by_trainer, save_strategy="steps", save_steps=STEPS, output_dir=f"trainer-{how}")
    for way, train in trains.items():
        model = getattr(finetune, how)()
        with Probe(model) as probe:
            runs[way, how] = train(model), probe

# %% jupyter={"source_hidden": true}
curves = ranks.get("{key: curve for key, (curve, _) in runs.items()}")[0]
ways = [*layers]
looks = [(plots.FAINT, 9, "-"), (plots.RANK_COLORS[0], 2, "-"), (plots.RANK_COLORS[5], 2, ":")]
fig, panels = plots.figure(2, width=9.0, height=2.8)
for axes, how, title in zip(panels, ("full", "lora"), ("all parameters", "LoRA")):
    for way, (color, width, line) in zip(ways, looks):
        axes.plot(range(1, 11), [loss for loss, _ in curves[way, how]], line, label=way, color=color, linewidth=width)
    axes.set(title=title, xlabel="step", ylabel="loss", ylim=(0, 8.5))
panels[0].legend(frameon=False)
plots.show(fig, alt="Losses of the three ways over ten steps lie on each other, all parameters and LoRA.")

# %% [markdown]
# You do: at every step the three losses agree within 0.0001, and the norms of the gradients before clipping within
# 0.002. It took four equal things, besides weights and precision: the samples and their order, the denominator of
# the loss, AdamW's settings with their schedule, and clipping by the norm over all ranks.
#
# That is why `by_trainer` has so many arguments. Whatever you leave out gets the program's default, here read from
# the installed versions. When you move a run from one program to another, set every row of the table.

# %%
# %%ranks
loop, program, args = torch.optim.AdamW([torch.zeros(1)]).defaults, OptimConfig, TrainingArguments
defaults = [
    ["learning rate", loop["lr"], program.lr, args.learning_rate],
    ["its schedule", "none", program.decay, str(args.lr_scheduler_type)],
    ["second beta", loop["betas"][1], program.betas[1], args.adam_beta2],
    ["weight decay", loop["weight_decay"], program.weight_decay, args.weight_decay],
    ["largest norm", "not clipped", program.clip, args.max_grad_norm],
    ["order of the samples", "yours", "by the seed", args.train_sampling_strategy],
]

# %%
Table(["if left out", *ways], ranks.get("defaults")[0])

# %% [markdown]
# No row is the same in all three, and the learning rates differ by up to a factor of 20. One difference has no row:
# once weight decay is on, `Trainer` exempts norms and biases, and the other two decay all that is trained.
#
# ## What a rank holds and sends
#
# Equal losses could still cost different memory. The figure shows for rank 0 what it holds **at rest**, between
# steps; what it gathers and reduces **in one step**; and the most parameters that it has **full at once**, gathered
# from all ranks (without the all-gathers' buffers). Compare the upper three rows with each other, then with the
# lower three.

# %% tags=["held"]
rows = ranks.get("{key: [n / 2**10 for n in probe.row()] for key, (_, probe) in runs.items()}")[0]
kib = {f"{way}, {how}": rows[way, how] for how in ("full", "lora") for way in ways}
plots.amounts({
    "at rest": {run: dict(zip(("parameters", "gradients", "AdamW's averages"), row)) for run, row in kib.items()},
    "in one step": {run: {"gathered": row[3], "reduced": row[4]} for run, row in kib.items()},
    "full at once": {run: {"full parameters": row[5]} for run, row in kib.items()},
}, unit="KiB", alt="What rank 0 holds, gathers and reduces, and has in full at once, in six runs.")

# %% jupyter={"source_hidden": true} tags=["check"]
for (way, how), curve in curves.items():
    for found, mine in zip(curve, curves["your own loop", how], strict=True):
        assert abs(found[0] - mine[0]) < 1e-4 and abs(found[1] - mine[1]) < 2e-3, (way, how)  # noqa: PT018
for way in ways:
    full, lora = rows[way, "full"], rows[way, "lora"]
    assert lora[4] < 0.05 * full[4] < lora[3] < 1.1 * full[3]
    assert full[:3] == rows[ways[0], "full"][:3] and lora[:3] == rows[ways[0], "lora"][:3]  # noqa: PT018
assert 1 < rows["Trainer", "full"][3] / rows[ways[0], "full"][3] < 1.03

# %% [markdown]
# **Between the programs** there is no difference at rest. In a step, `Trainer` gathers 16 KiB more and has 32 KiB
# less in full at once, because Accelerate cuts the model into other units. `shard` leaves embedding, last norm and
# head, 32 KiB together, in the model's own unit: it is gathered once and stays until backward ends. Accelerate
# makes the embedding a unit, which is gathered twice, and norm with head another. So `Trainer`'s peak is two
# blocks, 417 KiB, and the others have the 32 on top. That matters with a large vocabulary: embedding and head of
# Llama 3 8B are 2 GiB in bf16. In your own loop, make them units as in [lesson 1](01_transformer_wrapper.ipynb).
#
# **From all parameters to LoRA**, a rank holds 188 instead of 658 KiB at rest. (658 is a quarter each of weights,
# gradients and two averages; with four ranks that happens to be the size of the model.) Gradients and averages
# remain for the adapters alone and shrink to 4%, as do the reduced bytes. What is gathered doesn't shrink, because
# frozen weights compute, too ([lesson 9](09_child_tuning.ipynb)).
#
# ## Your turn 1 · Train adapters only
#
# In the LoRA runs PEFT froze the base model. Now you do it, for a model with adapters, not yet sharded, in which
# *every* parameter requires a gradient. Write `prepare(model)`: it lets only the adapters be trained (12 tensors,
# with `lora_` in their names), shards the model by `shard(model)`, and returns the optimizer. The turn takes four
# steps with it, and compares the losses with the LoRA run above.
#
# <details><summary>Hint</summary>
#
# `adamw(model)`, from way 1, makes the optimizer of all parameters that require a gradient; mind that `shard` puts
# new parameters in the old ones' place.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import Goal, NotYet, exactly, turn

COUNT = sum(p.requires_grad for p in finetune.lora().parameters())
PREPARED = {
    "the model is sharded": exactly(True, "`prepare` has not sharded the model: call `shard(model)`."),
    "tensors that require a gradient": exactly(
        COUNT, less="An adapter is frozen: they are the parameters with `lora_` in their names.",
        more="The base model requires gradients, too. FSDP2 computes and reduces them, and clipping counts them, "
        "whatever the optimizer was given: set `requires_grad_` by name.",
    ),
    "of them, in the optimizer": exactly(COUNT, less="`shard` replaces the parameters: make the optimizer afterwards, of all adapters."),
    "lr, betas and weight decay of `adamw`": exactly(True, "`adamw` has `lr=LR`, `betas=BETAS` and `weight_decay=0.0`."),
    "losses as with PEFT's own freezing": exactly(True, "The losses differ from those of the same adapters above."),
}

@turn(1, PREPARED)
def score_adapters(prepare):
    model = finetune.lora().to(device).requires_grad_(True)
    optimizer = prepare(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise NotYet("`prepare` returns the optimizer.")
    trained = [p for p in model.parameters() if p.requires_grad]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [isinstance(model, FSDPModule), len(trained), sum(id(p) in held for p in trained)]
    right = None
    if found == [True, COUNT, COUNT]:                           # else the steps would mean nothing
        losses = [plain_step(model, optimizer, share(step))[0] for step in range(4)]
        right = all(abs(mine - of[0]) < 1e-4 for mine, of in zip(losses, runs["your own loop", "lora"][0]))
    asked = {"lr": LR, "betas": BETAS, "weight_decay": 0.0}.items()
    same = all(group[key] == value for group in optimizer.param_groups for key, value in asked)
    return dict(zip(PREPARED, [*found, same, right]))

# %%
# %%turn 1
def prepare(model):                             # not sharded; everything requires a gradient
    return None                                 # your lines here: freeze, shard, return the optimizer

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
    named = [(name, p) for name, p in shard(model).named_parameters() if "lora_" in name]
    return torch.optim.AdamW(named, lr=LR, betas=BETAS, weight_decay=0.0)

# %% tags=["wrong"] turn=1 says="The base model requires gradients, too"
def prepare(model):                             # the optimizer leaves the base out, and FSDP does not know
    shard(model)
    return torch.optim.AdamW([p for name, p in model.named_parameters() if "lora_" in name], lr=LR, betas=BETAS)

# %% tags=["wrong"] turn=1 says="make the optimizer afterwards"
def prepare(model):                             # the optimizer before sharding
    [p.requires_grad_("lora_" in name) for name, p in model.named_parameters()]
    optimizer, _ = adamw(model), shard(model)
    return optimizer

# %% tags=["wrong"] turn=1 says="weight_decay=0.0"
def prepare(model):                             # torch's default weight decay
    [p.requires_grad_("lora_" in name) for name, p in model.named_parameters()]
    return torch.optim.AdamW([p for p in shard(model).parameters() if p.requires_grad], lr=LR, betas=BETAS)

# %% [markdown]
# ## Precision
#
# So far everything was float32. Now all three are asked for bf16: the loop by the policy of
# [lesson 7](07_mixed_precision.ipynb), the program by `precision="bf16"`, `Trainer` by `bf16=True`. The bytes sent
# tell in which dtype parameters are gathered and in which the ranks' gradients are added up: 2 bytes for a number
# are bf16, 4 are float32. The last row of the table is `Trainer` again, after this assignment before `train()`:
# `trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = policy`.

# %%
# %%ranks
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
asked = {
    "your own loop": partial(by_hand, steps=4, policy=policy),
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
# The third row is the odd one: `Trainer` adds up the ranks' gradients in bf16, because Accelerate's `bf16` sets
# `reduce_dtype` with `param_dtype`. That saves half of the reduced bytes, but each addition rounds: lesson 7 finds
# such sums 0.7% off with 64 simulated ranks. Transformers 5.23 has no argument for it; the assignment helps, as the
# last row shows. All four keep float32 parameters at rest, because `full()` loads them so. Load yours so, too: of a
# model in bf16, `Trainer` with `bf16=True` converts the trained parameters to float32, and your loop doesn't.
#
# ## Checkpoints of LoRA
#
# With LoRA, a checkpoint could leave out the base model, which never changes. Do the three? `fsdp_utils.train` and
# `Trainer` saved the last step of the runs above. Your loop saves by torch's DCP, in the next cell, where
# `ignore_frozen_params` leaves out what isn't trained. The folded `tensor_kib` adds up the tensors in the files.

# %% jupyter={"source_hidden": true}
# %%ranks
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

def tensor_kib(out):
    """KiB of the tensors in a checkpoint: DCP's files have metadata, those of fsdp_utils.train are safetensors."""
    entries = [entry for path in Path(out).rglob(".metadata")
               for entry in FileSystemReader(path.parent).read_metadata().state_dict_metadata.values()]
    sizes = [entry.size.numel() * entry.properties.dtype.itemsize for entry in entries if hasattr(entry, "size")]
    sizes += [tensor.nbytes for path in Path(out).rglob("*.safetensors") for tensor in load_file(path).values()]
    return round(sum(sizes) / 2**10)

# %%
# %%ranks
for how in ("full", "lora"):
    probe = runs["your own loop", how][1]                       # holds the model and the optimizer of the run
    only_trained = StateDictOptions(ignore_frozen_params=True)
    weights, moments = get_state_dict(probe.model, probe.optimizer, options=only_trained)
    dcp.save({"model": weights, "optimizer": moments, "step": STEPS}, checkpoint_id=f"loop-{how}")
saved = [[way, *(tensor_kib(f"{out}-{how}") for how in ("full", "lora"))]
         for way, out in zip(("your own loop", "fsdp_utils.train", "Trainer"), ("loop", "program", "trainer"))]

# %%
saved = ranks.get("saved")[0]
assert saved[1][2] > 5 * saved[0][2] == 5 * saved[2][2]
Table(["saved by", "all parameters, KiB", "LoRA, KiB"], saved)

# %% [markdown]
# With all parameters, each saves 1,973 KiB: the weights, 658, and AdamW's two averages. With LoRA, your loop and
# `Trainer` save the same three for the adapters alone: 72 KiB, of use only beside the base. `fsdp_utils.train`
# saves the frozen base as well, 658 KiB more. Such a checkpoint needs no other file, but with 8 billion parameters
# in float32 it takes about 30 GiB.
#
# Can PEFT read the adapter? `Trainer`'s default, `FULL_STATE_DICT`, gathers the whole model in rank 0's CPU memory
# ([lesson 3](03_full_state_dict.ipynb)) and writes a file for PEFT. With `SHARDED_STATE_DICT`, as in `by_trainer`,
# each rank writes its shards by DCP, which PEFT doesn't read. Then, as in your own loop, call `full_tensor()` on
# each tensor of `peft.get_peft_model_state_dict(model)`, on every rank, and let rank 0 save the results. For this
# library's checkpoints there is `export_safetensors(..., adapter_only=True)` ([recipes](../book/trainers.md)).
#
# ## Your turn 2 · Accumulate as Trainer does
#
# If a step's samples don't fit at once, you split them into micro-batches and add up their gradients. `Trainer`
# does it by `gradient_accumulation_steps=2`. Write `accumulate(model, parts)`, which does the same in your loop for
# `parts`, this rank's list of micro-batches for one step. It
#
# - runs forward and backward on each, so that the gradients are those of the mean over *all labels of the step*;
# - reduces the gradients once, 658 KiB, not with each micro-batch;
# - returns this rank's loss, without gradient: its mean over the ranks is that mean over all labels.
#
# The turn makes the optimizer steps, and compares with `Trainer` on the same micro-batches.
#
# <details><summary>Hint</summary>
#
# `labels_per_rank(parts)` counts over all micro-batches that you give it. After
# `model.set_requires_gradient_sync(False)`, backward keeps its gradients on this rank, until you set it to True.
#
# </details>

# %% tags=["accumulate"] jupyter={"source_hidden": true}
# %%ranks
with Probe(model := finetune.full()) as accumulated:
    trainers = by_trainer(model, 4, parts=2)
assert max(abs(a[0] - b[0]) for a, b in zip(trainers, runs["Trainer", "full"][0])) < 1e-4
ONCE = accumulated.sent("reduce_scatter") / 2**10

def about_loss(ratio):
    if abs(ratio * world - 1) < 0.01:
        return "FSDP averages over the ranks: divide by the labels per rank, not by those of all ranks."
    return "This is not the mean over all labels: divide by the labels of all micro-batches on all ranks, per rank."

ACCUMULATED = {
    "loss of step 1, divided by Trainer's": Goal("1", lambda ratio: ratio == 1, about_loss),
    "norm of step 1, divided by Trainer's": exactly(1, "This is not the gradient of your loss: call backward once for each part, and reduce the last."),
    "losses of steps 2 to 4 as Trainer's": exactly(True, "The steps after the first one differ."),
    "KiB reduced in a step": exactly(
        ONCE, less="Nothing is reduced: each rank would step with its own gradients.",
        more="Each micro-batch reduces all gradients: only the last one has to.",
    ),
}

@turn(2, ACCUMULATED)
def score_accumulate(accumulate):
    model = shard(finetune.full().to(device))
    optimizer, curve = adamw(model), []
    with Probe(model) as probe:
        for step in range(4):
            loss = torch.as_tensor(accumulate(model, share(step, parts=2)), device=device).detach() / world
            if all(p.grad is None for p in model.parameters()):
                return {"KiB reduced in a step": 0}
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).full_tensor().item()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss)
            curve.append((loss.item(), norm))
    of_loss, of_norm = (round(mine / trainers_own, 3) for mine, trainers_own in zip(curve[0], trainers[0]))
    same = all(abs(a[0] - b[0]) < 1e-3 for a, b in zip(curve[1:], trainers[1:]))
    of_norm, same = (of_norm, same) if of_loss == 1 else (None, None)       # they would differ for the same reason
    return dict(zip(ACCUMULATED, [of_loss, of_norm, same, probe.sent("reduce_scatter") / 2**10]))

# %%
# %%turn 2
def accumulate(model, parts):                   # parts: a list of micro-batches, dicts for model(**part)
    return None                                 # your lines here

# %% tags=["solution"] turn=2
def accumulate(model, parts):
    labels, mine = labels_per_rank(parts), 0.0
    for part in parts:
        model.set_requires_gradient_sync(part is parts[-1])
        loss = model(**part, num_items_in_batch=labels).loss
        loss.backward()
        mine += loss.detach()
    return mine

# %% tags=["right"] turn=2
def accumulate(model, parts):                   # the gradients are multiplied at the end; a float
    losses = []
    for part in parts:
        model.set_requires_gradient_sync(part is parts[-1])
        losses.append(model(**part, num_items_in_batch=labels_per_rank(parts) * world).loss)
        losses[-1].backward()
    [parameter.grad.mul_(world) for parameter in model.parameters()]
    return sum(loss.item() for loss in losses) * world

# %% tags=["right"] turn=2
def accumulate(model, parts):                   # the loss by hand
    labels, mine = labels_per_rank(parts).item(), []
    for part in parts:
        model.set_requires_gradient_sync(part is parts[-1])
        logits = model(part["input_ids"]).logits[:, :-1]
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part["labels"][:, 1:].flatten(), reduction="sum")
        (total / labels).backward()
        mine.append(total.item() / labels)
    return torch.tensor(sum(mine))

# %% tags=["right"] turn=2
def accumulate(model, parts):                   # each own mean, weighted by its labels
    losses = []
    for part in parts:
        model.set_requires_gradient_sync(part is parts[-1])
        losses.append(model(**part).loss * (part["labels"][:, 1:] != -100).sum() / labels_per_rank(parts))
        losses[-1].backward()
    return torch.stack(losses).detach().sum()

# %% tags=["wrong"] turn=2 says="not the mean over all labels"
def accumulate(model, parts):                   # the mean of the means
    losses = []
    for part in parts:
        model.set_requires_gradient_sync(part is parts[-1])
        losses.append(model(**part).loss / len(parts))
        losses[-1].backward()
    return sum(losses).detach()

# %% tags=["wrong"] turn=2 says="FSDP averages over the ranks"
def accumulate(model, parts):                   # divided by the labels of all ranks
    losses = []
    for part in parts:
        model.set_requires_gradient_sync(part is parts[-1])
        losses.append(model(**part, num_items_in_batch=labels_per_rank(parts) * world).loss)
        losses[-1].backward()
    return sum(losses).detach()

# %% tags=["wrong"] turn=2 says="only the last one has to"
def accumulate(model, parts):                   # reduced at each micro-batch
    losses = []
    for part in parts:
        losses.append(model(**part, num_items_in_batch=labels_per_rank(parts)).loss)
        losses[-1].backward()
    return sum(losses).detach()

# %% tags=["wrong"] turn=2 says="Nothing is reduced"
def accumulate(model, parts):                   # each rank would step with its own gradients
    model.set_requires_gradient_sync(False)
    for part in parts:
        (loss := model(**part).loss).backward()
    return loss.detach()

# %% [markdown]
# `Trainer` counts the same labels (`average_tokens_across_devices`, on by default), and its losses with two
# micro-batches are those with one. Why does the turn compare norms? If all gradients are too small by the same
# factor, AdamW takes nearly the same steps, because it divides each gradient by its usual size. Without clipping,
# the losses then show nothing. The norm does: **compare gradient norms, too.**
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | `fsdp=True`, and each rank holds the whole model | Accelerate has no FSDP for this type of device, and says nothing | look at `trainer.is_fsdp_enabled` |
# | `AcceleratorState has already been initialized` | a `Trainer` of another precision ran in this process | a new process for each run |
# | losses differ at step 1 | other samples (`Trainer` shuffles by its own seed), or a mean of means | `train_sampling_strategy="sequential"`; divide by all labels |
# | losses differ from step 2 or 3 on | a setting of the table of defaults was left out, or one program decays norms | set them all |
# | with dropout and `fsdp_config={"activation_checkpointing": True}`, a model learns less well | Accelerate 1.15 recomputes with `preserve_rng_state=False`: backward drops other numbers than forward | `TrainingArguments(activation_checkpointing=True)`; it warns of one more all-gather, which we didn't find |
#
# ## The rule
#
# `Trainer` for its datasets and callbacks, `fsdp_utils.train` for resuming by itself, your own loop for an unusual
# step. Then check three things: that it shards (`trainer.is_fsdp_enabled`, or `check_sharding(model)`), what a
# checkpoint holds, and that losses *and* gradient norms of a few steps equal those of the program that you trust.

# %% jupyter={"source_hidden": true}
os.chdir(home)
shutil.rmtree(folder)

# %% [markdown]
# [← lesson 16](16_two_dimensions.ipynb) · [lesson 18 →](18_beyond_forward_and_backward.ipynb)
