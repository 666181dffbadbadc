# %% [markdown]
# # 17 · Fine-tune: own loop, fsdp_utils.train or Trainer?
#
# You have a model, your own data and several GPUs. Who should run the training steps?
#
# - **`Trainer` of transformers**, if you work with its datasets, metrics and callbacks.
# - **`fsdp_utils.train`**, this library's training program, if the run has to go on by itself after it was interrupted.
# - **Your own loop**, if the order of forward, backward and `optimizer.step()` is itself new.
#
# The drawing shows who does what in each of them.

# %% jupyter={"source_hidden": true}
from fsdp_utils.lessons import lesson, plots

ways = {
    "your own loop": ["the loop", "you", "you", "you, by torch's DCP", "you"],
    "fsdp_utils.train": ["a function: data and model", "the program", "the program", "the program", "the same command"],
    "Trainer": ["TrainingArguments", "Trainer", "the model and Trainer", "Trainer and Accelerate", "resume_from_checkpoint"],
}
rows = ["you write", "runs each step", "divides the loss", "saves checkpoints", "resumes"]
layers = {way: dict(zip(rows, does)) for way, does in ways.items()}
plots.layers(layers, above=[], below=["torch's fully_shard (FSDP2)"], alt="Who does what in the three, above fully_shard.")

# %% [markdown]
# On GPUs all three shard the model by torch's `fully_shard`. With the same settings they train the same, so the losses
# don't decide it. What should concern you are differences that no error reports: in the loss of some models, in
# defaults, in precision and in what a checkpoint holds. You measure them below, and a table at the end lists them.
# (Another loss is no obstacle: `Trainer` takes it by `compute_loss`. The step of `fsdp_utils.train` is fixed.)

# %% tags=["card"]
lesson.card(
    17,
    learn="choose a training program, and find the differences between three of them that no error reports",
    needs="[lesson 7](07_mixed_precision.ipynb) and [lesson 9](09_child_tuning.ipynb)",
    minutes=(1, 28, 27),
)

# %% [markdown]
# ## The script
#
# It trains the same small Llama for three steps in three ways: by a loop, by the same loop with another loss, and by
# `Trainer` with `fsdp=True`, its switch for FSDP2. Only the tokens of a sample's answer count in the loss: the others
# have the label -100. Look at the line after `if by_labels`, which is all that the two loops differ in. Save it as
# `train.py`, then run `torchrun --nproc-per-node 4 train.py`. On CPU ranks it prints what stands beneath.
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
#     model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))  # or from_pretrained(...)
#     return model      # with LoRA of peft: get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
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
#         own = (y[:, 1:] != -100).sum()                            # labels here; nothing predicts the first token
#         dist.all_reduce(labels_per_rank := own / world)           # a sum over the ranks: all labels / world
#         loss = model(input_ids=x, labels=y).loss                  # the mean over this rank's labels
#         if by_labels:
#             loss = loss * own / labels_per_rank
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
# **The losses.** The first loop differs from `Trainer` at the first step, before any weight has changed: the two define
# the loss differently. In that step the four ranks have answers of 6, 2, 7 and 9 tokens. In the first loop each rank
# takes the mean over its own tokens, and FSDP takes the mean of these means. So a token on the rank with 2 counts 4.5
# times as much as one on the rank with 9.
#
# The second loop takes one mean over all 24. `loss * own` turns a rank's mean back into the sum of its losses. The sum
# is divided by `labels_per_rank`, 24 / 4 = 6, and FSDP's mean over the four ranks divides by 4 again. This works for
# every model that returns a mean. Give each rank at least one label: the mean over none is NaN.
#
# **The bytes.** A rank of either loop holds a quarter of the model, and a rank of `Trainer` all of it. On CPU ranks
# `fsdp=True` has no effect: Accelerate, the library under `Trainer` that distributes the model, switches FSDP on for
# GPUs and other accelerators only. So **a test of your `Trainer` on CPU ranks tests DDP**: look at
# `trainer.is_fsdp_enabled`, which is False there.

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
ranks.start(preload=["fsdp_utils.lessons.programs", "transformers.models.llama.modeling_llama", "peft"])

# %% jupyter={"source_hidden": true}
# %%ranks
import contextlib
import inspect  # noqa: F401  a string below uses it
import json
import sys
import warnings
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from fsdp_utils import shard
from fsdp_utils.lessons.probe import Probe
from fsdp_utils.lessons.programs import TrainerOnCpus, run_trainer, save_base, small
from fsdp_utils.train import DataConfig, OptimConfig, ParallelConfig, TrainConfig, rows_at, train as train_program

rank, world = dist.get_rank(), dist.get_world_size()
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")    # peft reads a renamed attribute
warnings.filterwarnings("ignore", "FSDP2-wrapped module")                   # about writing into the model's output
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

# %% [markdown]
# ## A loss as many times too large as there are ranks
#
# `Trainer` counts the labels and gives the number to the model's `forward`, as `num_items_in_batch`. A Llama adds up
# its losses and divides by that number, and `Trainer` multiplies by the number of ranks, which undoes the mean that
# FSDP or DDP takes. BERT and T5 accept the argument, because their `forward` takes `**kwargs`, and ignore it. They
# return a mean, and `Trainer` multiplies that, too.
#
# The next cell compares the loss that `Trainer` logs with the script's recipe, for one and two micro-batches on each
# rank. `run_trainer`, from `fsdp_utils/lessons/programs.py`, trains by a `Trainer` with `fsdp=True`. So that it shards
# on CPU ranks, it is a `TrainerOnCpus`: this class, printed beneath, makes the assignments that Accelerate makes on
# GPUs. With Accelerate's own units BERT and T5 fail: BERT's are named in `fsdp_config`, T5 trains by DDP.

# %%
# %%ranks
def labels_of(part):
    return (part["labels"][:, 1:] != -100).sum()                # the first is -100 here for BERT and T5, too

def labels_per_rank(parts):
    """The number of labels in these micro-batches of a step, in the mean over the ranks."""
    dist.all_reduce(count := sum(map(labels_of, parts)) / world)
    return count

class ByLabels(TrainerOnCpus):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        output = model(**inputs)                                # its loss is a mean over labels_of(inputs) labels
        loss = output.loss * labels_of(inputs) / num_items_in_batch * self.accelerator.num_processes
        return (loss, output) if return_outputs else loss

def right_loss(name, n):                                        # the mean over all labels of a step
    model, mine = small(name).to(device), rows[rank : n * world : world]
    parts = [{key: value[None].to(device) for key, value in row.items()} for row in mine]
    with torch.no_grad():
        total = sum(model(**part).loss * labels_of(part) for part in parts)
    dist.all_reduce(mean := total / labels_per_rank(parts) / world)
    return mean.item()

torch.manual_seed(1)
ids = torch.randint(64, (2 * world, 24))
labels = ids.masked_fill(torch.arange(24) < torch.randint(1, 23, (2 * world, 1)), -100)
rows, too_large = [{"input_ids": x, "labels": y} for x, y in zip(ids, labels)], []
PLACE = {"Llama": {}, "BERT": {"fsdp_config": {"transformer_layer_cls_to_wrap": ["BertLayer"]}}, "T5": {"fsdp": False}}
for name, n in [("Llama", 1), ("BERT", 1), ("BERT", 2), ("T5", 1), ("T5", 2)]:
    step = {"max_steps": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": n, **PLACE[name]}
    losses = [run_trainer(small(name), rows, kind=kind, **step)[0][0] for kind in (TrainerOnCpus, ByLabels)]
    too_large.append([name, n, *(round(loss / right_loss(name, n), 2) for loss in losses)])

# %%
too_large, world = ranks.get("(too_large, world)")[0]
assert all(round(a / (1 if name == "Llama" else world * n)) == b == 1 for name, n, a, b in too_large)
print(ranks.get("inspect.getsource(TrainerOnCpus)")[0])
Table(["model", "micro-batches", "Trainer's loss / mean over all labels", "with ByLabels"], too_large)

# %% [markdown]
# A ratio of 1 is right. The losses of BERT and T5 are too large by the number of ranks times that of micro-batches, and
# so are their gradients. (T5's ratios are not whole: a mean of means is multiplied.) `ByLabels` mends both. BERT and T5
# predict the first label, too: with your own data count it. The trap is not theirs alone: an override of `compute_loss`
# that returns `model(**inputs).loss` gives a mean of means for a Llama, too, n times as large with n micro-batches.
#
# ## With equal settings, equal losses
#
# The three fine-tune a small Llama that has begun to learn dates in digits (`7 march 1998>1998-03-07`). A folded cell makes it,
# as the folder `base`. The new task is the way back, `1998-03-07>7 march 1998`, whose answers differ in length.

# %%
# %%writefile finetune.py
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from fsdp_utils.lessons import tasks

BASE = "base"                                   # a folder, or the name of a model on the hub

def full():                                     # all parameters are trained
    return AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)

def lora():                                     # adapters are trained, and the model beneath is frozen
    torch.manual_seed(0)                        # the same adapters on every rank
    return get_peft_model(full(), LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))

def encode(pairs):                              # ids and labels, i64[dates, longest]
    rows = [[tasks.ID_OF[c] for c in f"{digits}>{words}"] + [tasks.END] for words, digits in pairs]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, tasks.PAD)
    labels = ids.masked_fill(ids == tasks.PAD, -100)         # -100: not in the loss
    labels[:, :11] = -100                                    # the question, `1998-03-07>`
    return {"input_ids": ids, "labels": labels}

def full_task():                                # for fsdp_utils.train: a model, samples to train and to test
    return tasks.Task(full, *map(encode, tasks.date_pairs()), predicts_next=True)

def lora_task():
    return tasks.Task(lora, *map(encode, tasks.date_pairs()), predicts_next=True)

# %% [markdown]
# For your own model and data change `BASE`, `target_modules` and `encode`. `encode` returns a dict of tensors with a
# row for each sample: ids from your tokenizer, padded, and labels that are -100 for prompt and padding. Each process
# loads the whole model into CPU memory before it is sharded; where that doesn't fit, see
# [lesson 12](12_a_model_too_big_for_one_rank.ipynb), and for `Trainer` `cpu_ram_efficient_loading` of `fsdp_config`.

# %% jupyter={"source_hidden": true}
# %%ranks
BATCH, STEPS, LR, BETAS, CLIP, SEED = 24, 10, 3e-3, (0.9, 0.95), 1.0, 23108
if rank == 0:
    save_base("base")
dist.barrier()                                  # the others wait for the folder
sys.path.insert(0, "")                          # finetune.py is in the working directory
import finetune

data = finetune.full_task().train
program_log = Path("program.log").open("a")     # noqa: SIM115  what fsdp_utils.train would print
order = rows_at(0, BATCH * 16, len(data["labels"]), SEED)     # i64[384]; in step 1 any mean of means is 0.07% off or more
rows = [{name: tensor[row] for name, tensor in data.items()} for row in order.tolist()]

def share(step, parts=1):
    """This rank's samples of a step, in so many micro-batches: a list of dicts of tensors."""
    rows = order[BATCH * step : BATCH * (step + 1)].view(parts, world, -1)[:, rank]
    return [{name: tensor[part].to(device) for name, tensor in data.items()} for part in rows]

def by_program(how, model, steps=STEPS, precision="fp32", out="program"):
    optim = OptimConfig(lr=LR, betas=BETAS, weight_decay=0.0, decay="none", clip=CLIP)
    data = DataConfig(source=f"finetune:{how}_task", batch_size=BATCH)
    place = ParallelConfig(precision=precision, device="auto" if on_gpu else "cpu")
    config = TrainConfig(f"{out}-{how}", steps=steps, data=data, optim=optim, parallel=place, seed=SEED)
    with patch.object(finetune, how, lambda: model), contextlib.redirect_stderr(program_log):
        train_program(config)                   # it trains the model that the probe watches
    dist.barrier()                              # rank 0 has written the file
    lines = [json.loads(line) for line in Path(config.out, "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["norm"]) for line in lines if "loss" in line]

# %% [markdown]
# **Way 1, your own loop**, is the script's. Folded cells give it AdamW's settings `LR` and `BETAS`, the largest norm
# `CLIP`, `STEPS` and `BATCH`, the samples of a step on all ranks. `share(step)` returns this rank's `parts` of that
# batch, a list of micro-batches: one, or two in turn 2. `rows` are the same samples for `Trainer`.

# %%
# %%ranks
def plain_step(model, optimizer, parts):
    loss = model(**parts[0]).loss * labels_of(parts[0]) / labels_per_rank(parts)
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
# **Way 2, `fsdp_utils.train`**, you'd start in a terminal. Here the ranks are running already, so the folded
# `by_program` calls it as a function with these settings; betas, clipping and batch are its defaults:
#
# ```bash
# torchrun --nproc-per-node 4 -m fsdp_utils.train --out runs/lora --data.source finetune:lora_task \
#     --optim.lr 0.003 --optim.decay none --optim.weight_decay 0 --steps 10 --seed 23108
# ```
#
# **Way 3, `Trainer`**, needs the most arguments to do the same:

# %%
# %%ranks
def by_trainer(model, steps=STEPS, parts=1, **more):
    return run_trainer(
        model, rows, max_steps=steps, per_device_train_batch_size=BATCH // world // parts,
        gradient_accumulation_steps=parts, learning_rate=LR, lr_scheduler_type="constant", adam_beta1=BETAS[0],
        adam_beta2=BETAS[1], max_grad_norm=CLIP, fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"}, **more,
    )                                                           # fmt: skip

runs = {}
for how in ("full", "lora"):
    trains = {"your own loop": by_hand, "fsdp_utils.train": partial(by_program, how)}
    trains["Trainer"] = partial(by_trainer, save_strategy="steps", save_steps=STEPS, output_dir=f"trainer-{how}")
    for way, train in trains.items():
        model = getattr(finetune, how)()
        with Probe(model) as probe:                             # counts what a rank holds and sends, for later
            runs[way, how] = train(model), probe

# %% jupyter={"source_hidden": true}
curves = ranks.get("{key: curve for key, (curve, _) in runs.items()}")[0]
for (_, how), curve in curves.items():
    assert all(abs(a[0] - b[0]) < 1e-4 and abs(a[1] - b[1]) < 2e-3 for a, b in zip(curve, curves["your own loop", how], strict=True))
lines = [[way, how, *(round(curve[step - 1][0], 3) for step in (1, 4, 7, 10))] for (way, how), curve in curves.items()]
Table(["losses", "trained", *(f"step {step}" for step in (1, 4, 7, 10))], lines)

# %% [markdown]
# The losses of all steps agree, and so do the norms before clipping, as the folded cell asserts, but for rounding. This
# took equal samples in order, equal denominators of the loss, equal AdamW settings, and clipping by the global norm.
#
# ## The defaults
#
# What you leave out gets each program's default, here read from the installed versions.

# %%
# %%ranks
loop, program, args = torch.optim.AdamW([torch.zeros(1)]).defaults, OptimConfig, transformers.TrainingArguments
defaults = [
    ["learning rate", loop["lr"], program.lr, args.learning_rate],
    ["its schedule", "none", program.decay, str(args.lr_scheduler_type)],
    ["second beta", loop["betas"][1], program.betas[1], args.adam_beta2],
    ["weight decay", loop["weight_decay"], program.weight_decay, args.weight_decay],
    ["largest norm", "not clipped", program.clip, args.max_grad_norm],
    ["samples in a step", "yours", f"{DataConfig('').batch_size} in all", f"{args.per_device_train_batch_size} a rank"],
    ["order of the samples", "yours", "by the seed", args.train_sampling_strategy],
]

# %%
Table(["if left out", *ways], ranks.get("defaults")[0])

# %% [markdown]
# The learning rates differ by up to a factor of 20, so when you move a run from one program to another, set every row.
# One difference has no row: once weight decay is on, `Trainer` exempts norm layers and biases, and the others don't.
#
# ## Precision
#
# Now all three are asked for bf16: the loop by the policy of [lesson 7](07_mixed_precision.ipynb), the program by
# `precision="bf16"`, `Trainer` by `bf16=True`. The bytes sent for one number tell its dtype: 2 are bf16, 4 are float32.
# The last row is `Trainer` after this assignment before `train()`:
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
    precision.append([way, *(round(4 * probe.sent(k) / whole.sent(k), 1) for k in ("all_gather", "reduce_scatter"))])

# %%
precision = ranks.get("precision")[0]
assert [row[2] for row in precision] == [4, 4, 2, 4]
Table(["asked for bf16", "bytes gathered for one number", "bytes reduced for one gradient"], precision)

# %% [markdown]
# The third row is the odd one: `Trainer` adds up the ranks' gradients in bf16, because Accelerate's `bf16` sets
# `reduce_dtype` with `param_dtype`. That saves half of the reduced bytes, but each addition rounds: lesson 7 measures
# what it costs. Transformers 5.23 has no argument for it; the assignment helps, as the last row shows.
#
# ## Checkpoints of LoRA
#
# With LoRA, a checkpoint could leave out the base model, which never changes. Do the three? `fsdp_utils.train` and
# `Trainer` saved the last step of the runs above. Your loop saves by torch's distributed checkpoints (DCP), in the next
# cell, where `ignore_frozen_params` leaves out what isn't trained.

# %%
# %%ranks
only_trained = StateDictOptions(ignore_frozen_params=True)
for how in ("full", "lora"):
    probe = runs["your own loop", how][1]                       # holds the model and the optimizer of the run
    weights, moments = get_state_dict(probe.model, probe.optimizer, options=only_trained)
    dcp.save({"model": weights, "optimizer": moments, "step": STEPS}, checkpoint_id=f"loop-{how}")

# %% jupyter={"source_hidden": true} tags=["check"]
# %%ranks
def tensor_kib(folder):
    """KiB of the tensors in a checkpoint: those of safetensors, and of DCP's files by their metadata."""
    sizes = [t.nbytes for path in Path(folder).rglob("*.safetensors") for t in load_file(path).values()]
    for path in Path(folder).rglob(".metadata"):
        entries = dcp.FileSystemReader(path.parent).read_metadata().state_dict_metadata.values()
        sizes += [e.size.numel() * e.properties.dtype.itemsize for e in entries if hasattr(e, "size")]
    return round(sum(sizes) / 2**10)

dist.barrier()
saved = [[tensor_kib(f"{out}-{how}") for how in ("full", "lora")] for out in ("loop", "program", "trainer")]
dist.barrier()                                  # the next runs save to these folders
unstopped = by_hand(finetune.lora(), 12)[10:]
resumed = by_trainer(finetune.lora(), 12, resume="trainer-lora/checkpoint-10", save_steps=10)   # as when it was saved
for run in by_program("lora", finetune.lora(), 12), resumed:
    assert all(abs(a[0] - b[0]) < 1e-4 for a, b in zip(run[-2:], unstopped))

# %%
saved = ranks.get("saved")[0]
assert saved[1][1] > 5 * saved[0][1] == 5 * saved[2][1]
Table(["saved by", "all parameters, KiB", "LoRA, KiB"], [[way, *kib] for way, kib in zip(ways, saved)])

# %% [markdown]
# With all parameters, each saves the weights and AdamW's two averages. With LoRA, your loop and `Trainer`, here with
# `SHARDED_STATE_DICT`, save the same three for the adapters alone, of use only beside the base. `fsdp_utils.train`
# saves the frozen base, too: 730 - 72 = 658 KiB here, and 4 bytes for each parameter of yours.
#
# PEFT does not read what DCP wrote. `Trainer`'s default, `FULL_STATE_DICT`, gathers the whole model in rank 0's CPU
# memory ([lesson 3](03_full_state_dict.ipynb)) and writes a file for PEFT. For this library's checkpoints there is
# `export_safetensors(..., adapter_only=True)` ([recipes](../book/trainers.md)).
#
# Both programs also resume: the folded check lets each train two steps more from its checkpoint of LoRA, and the losses
# are those of a run of 12 steps without a stop. `fsdp_utils.train` needs the same command again, on any number of ranks
# ([lesson 10](10_end_to_end.ipynb)); `trainer.train(resume_from_checkpoint=True)` raises while there is no checkpoint.
#
# ## What a rank holds and sends
#
# The figure shows what rank 0 holds when `optimizer.step()` returns, and what it gathers and reduces in a step;
# `fsdp_utils.train` has your loop's numbers.

# %% tags=["held"]
held = ranks.get("{key: [n / 2**10 for n in probe.row()] for key, (_, probe) in runs.items()}")[0]
kib = {f"{way}, {how}": held[way, how] for how in ("full", "lora") for way in ("your own loop", "Trainer")}
plots.amounts({
    "after optimizer.step()": {run: dict(zip(("parameters", "gradients", "AdamW's averages"), row)) for run, row in kib.items()},
    "in one step": {run: {"gathered": row[3], "reduced": row[4]} for run, row in kib.items()},
}, unit="KiB", alt="What rank 0 holds after step(), and gathers and reduces in one: own loop and Trainer, full and LoRA.")

# %% jupyter={"source_hidden": true} tags=["check"]
for way in ways:
    full, lora = held[way, "full"], held[way, "lora"]
    assert lora[4] < 0.05 * full[4] < lora[3] < 1.1 * full[3]
    assert full[:3] == held["your own loop", "full"][:3] and lora[:3] == held["your own loop", "lora"][:3]  # noqa: PT018
assert held["fsdp_utils.train", "full"] == held["your own loop", "full"] and held["fsdp_utils.train", "lora"] == held["your own loop", "lora"]  # noqa: PT018
assert 1 < held["Trainer", "full"][3] / held["your own loop", "full"][3] < 1.03

# %% [markdown]
# **Between the programs**, only the gathers differ. `Trainer` gathers 16 KiB more, the size of the embedding:
# Accelerate makes it a unit, which is gathered for forward and again for backward. `shard` leaves it in the model's own
# unit, which stays gathered until backward ends ([lesson 1](01_transformer_wrapper.ipynb)).
#
# **From all parameters to LoRA**, gradients and averages remain for the adapters alone. What is gathered doesn't
# shrink: frozen weights compute, too ([lesson 9](09_child_tuning.ipynb)).
#
# ## Your turn 1 · Train adapters only
#
# In the LoRA runs PEFT froze the base model. Now you do it, for an unsharded model with adapters, in which *every*
# parameter requires a gradient. Write `prepare(model)`: it lets only the adapters be trained (12 tensors, with `lora_`
# in their names), shards the model by `shard(model)`, and returns the optimizer. The turn compares with the LoRA run.
#
# <details><summary>Hint</summary>
#
# `adamw(model)`, from way 1, makes the optimizer of all that requires a gradient; `shard` replaces parameters.
#
# </details>

# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.your_turn import Goal, NotYet, at_most, exactly, turn

COUNT = sum(p.requires_grad for p in finetune.lora().parameters())
PREPARED = {
    "the model is sharded": exactly(True, "`prepare` has not sharded the model: call `shard(model)`."),
    "tensors that require a gradient": exactly(
        COUNT, less="An adapter is frozen: they are the parameters with `lora_` in their names.",
        more="The base model requires gradients, too. FSDP2 computes and reduces them, and clipping counts them, whatever the optimizer was given: set `requires_grad_` by name.",
    ),
    "of them, in the optimizer": exactly(COUNT, less="The optimizer lacks adapters: make it of all of them, and after `shard`, which replaces the parameters."),
    "lr, betas and weight decay of `adamw`": exactly(True, "`adamw` has `lr=LR`, `betas=BETAS` and `weight_decay=0.0`."),
    "losses as with PEFT's own freezing": exactly(True, "The losses differ from those of the LoRA run above: is `shard(model)` called without a policy?"),
}

@turn(1, PREPARED)
def score_adapters(prepare):
    model = finetune.lora().to(device).requires_grad_(True)
    optimizer = prepare(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise NotYet("`prepare` returns the optimizer.")
    trained = [p for p in model.parameters() if p.requires_grad]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    in_it = sum(id(p) in held for p in trained)
    found = [isinstance(model, FSDPModule), len(trained), in_it if len(trained) == COUNT else None]
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

# %% tags=["wrong"] turn=1 says="after `shard`, which replaces the parameters"
def prepare(model):                             # the optimizer before sharding
    [p.requires_grad_("lora_" in name) for name, p in model.named_parameters()]
    optimizer, _ = adamw(model), shard(model)
    return optimizer

# %% tags=["wrong"] turn=1 says="weight_decay=0.0"
def prepare(model):                             # torch's default weight decay
    [p.requires_grad_("lora_" in name) for name, p in model.named_parameters()]
    return torch.optim.AdamW([p for p in shard(model).parameters() if p.requires_grad], lr=LR, betas=BETAS)

# %% [markdown]
# ## Your turn 2 · Accumulate as Trainer does
#
# If a step's samples don't fit at once, you split them into micro-batches and add up their gradients. `Trainer` does it
# by `gradient_accumulation_steps=2`. Write `accumulate(model, parts)`, which does the same in your loop for `parts`,
# this rank's list of micro-batches for one step. The turn makes the optimizer steps, and compares with `Trainer`. It
#
# - runs forward and backward on each: the gradients are those of the mean over *all labels of the step*;
# - reduces the gradients once, not with each micro-batch;
# - holds the activations of one micro-batch at a time;
# - returns this rank's loss, without gradient: its mean over the ranks is that mean over all labels.
#
# <details><summary>Hint</summary>
#
# `labels_of(part)` counts this rank's labels in one micro-batch; `labels_per_rank(parts)`, all of them. After
# `model.set_requires_gradient_sync(False)`, backward keeps its gradients on this rank, until you set it to True.
#
# </details>

# %% tags=["accumulate"] jupyter={"source_hidden": true}
# %%ranks
with Probe(model := finetune.full()) as accumulated:
    trainers = by_trainer(model, 4, parts=2)
assert max(abs(a[0] - b[0]) for a, b in zip(trainers, runs["Trainer", "full"][0])) < 1e-4
ONCE = accumulated.sent("reduce_scatter") / 2**10
with Probe(model := finetune.full()) as of_each:
    by_trainer(model, 4, parts=2, accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}})
assert of_each.sent("reduce_scatter") / 2**10 == 2 * ONCE

shard(model := finetune.full().to(device)).set_requires_gradient_sync(False)
model(**share(0)[0]).loss.backward()
[unit.unshard() for unit in model.modules() if isinstance(unit, FSDPModule)]
assert sum(p.grad.nbytes for p in model.parameters()) / 2**10 == ONCE       # kept in full; reduced, it's a share of that

def about_loss(ratio):
    if abs(ratio * world - 1) < 0.01:
        return "FSDP averages over the ranks: divide by the labels per rank, not by those of all ranks."
    if ratio < 0.75:
        return "The returned loss is too small: add up the losses of all micro-batches, and divide once."
    return "This is not the mean over all labels: divide by the labels of all micro-batches on all ranks, per rank."

ACCUMULATED = {
    "loss of step 1, divided by Trainer's": Goal("1", lambda ratio: ratio == 1, about_loss),
    "norm of step 1, divided by Trainer's": exactly(1, "This is not the gradient of the loss that you return: call backward on it once for each part, and reduce the last."),
    "losses of steps 2 to 4 as Trainer's": exactly(True, "The steps after the first one differ: divide each part by the labels of the whole step, not by its own."),
    "samples on a rank with activations at once": at_most(BATCH // world // 2, "The activations of all micro-batches are there at once: call backward after each forward."),
    "KiB reduced in a step": exactly(
        ONCE, less="Nothing is reduced: each rank would step with its own gradients.",
        more="Each micro-batch reduces all gradients: only the last one has to.",
    ),
}

@turn(2, ACCUMULATED)
def score_accumulate(accumulate):
    model, alive, most = shard(finetune.full().to(device)), [], [0]

    def forward(module, args, output):                          # its samples' activations live until backward
        if output.logits.requires_grad:
            alive.append(len(output.logits))
            most.append(sum(alive))
            output.logits.register_hook(lambda gradient: alive.clear())

    model.register_forward_hook(forward)
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
    of_loss, of_norm = (round(mine / trainers_own, 4) for mine, trainers_own in zip(curve[0], trainers[0]))
    same = all(abs(a[0] - b[0]) < 1e-3 for a, b in zip(curve[1:], trainers[1:]))
    of_norm, same = (of_norm, same) if of_loss == 1 else (None, None)       # they would differ for the same reason
    return dict(zip(ACCUMULATED, [of_loss, of_norm, same, max(most), probe.sent("reduce_scatter") / 2**10]))

# %%
# %%turn 2
def accumulate(model, parts):                   # parts: a list of micro-batches, dicts for model(**part)
    return None                                 # your lines here

# %% tags=["solution"] turn=2
def accumulate(model, parts):
    per_rank, mine = labels_per_rank(parts), 0.0
    for part in parts:
        model.set_requires_gradient_sync(part is parts[-1])
        loss = model(**part).loss * labels_of(part) / per_rank
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
    labels, mine = labels_per_rank(parts).item(), 0.0
    for part in parts:
        model.set_requires_gradient_sync(part is parts[-1])
        logits, y = model(part["input_ids"]).logits[:, :-1].flatten(0, 1), part["labels"][:, 1:].flatten()
        (loss := torch.nn.functional.cross_entropy(logits, y, reduction="sum") / labels).backward()
        mine += loss.item()
    return torch.tensor(mine)

# %% tags=["right"] turn=2
def accumulate(model, parts):                   # transformers' own argument
    losses = []
    for part in parts:
        model.set_requires_gradient_sync(part is parts[-1])
        losses.append(model(**part, num_items_in_batch=labels_per_rank(parts)).loss)
        losses[-1].backward()
    return torch.stack(losses).detach().sum()

# %% tags=["wrong"] turn=2 says="not the mean over all labels"
def accumulate(model, parts):                   # each micro-batch's mean over the ranks, then their mean
    losses = []
    for part in parts:
        model.set_requires_gradient_sync(part is parts[-1])
        losses.append(model(**part).loss * labels_of(part) / labels_per_rank([part]) / len(parts))
        losses[-1].backward()
    return sum(losses).detach()

# %% tags=["wrong"] turn=2 says="FSDP averages over the ranks"
def accumulate(model, parts):                   # divided by the labels of all ranks
    losses = []
    for part in parts:
        model.set_requires_gradient_sync(part is parts[-1])
        losses.append(model(**part).loss * labels_of(part) / labels_per_rank(parts) / world)
        losses[-1].backward()
    return sum(losses).detach()

# %% tags=["wrong"] turn=2 says="call backward after each forward"
def accumulate(model, parts):                   # one backward of the sum: the activations of both parts
    loss = sum(model(**part).loss * labels_of(part) for part in parts) / labels_per_rank(parts)
    loss.backward()
    return loss.detach()

# %% tags=["wrong"] turn=2 says="only the last one has to"
def accumulate(model, parts):                   # reduced at each micro-batch
    losses = []
    for part in parts:
        losses.append(model(**part).loss * labels_of(part) / labels_per_rank(parts))
        losses[-1].backward()
    return sum(losses).detach()

# %% tags=["wrong"] turn=2 says="add up the losses of all micro-batches"
def accumulate(model, parts):                   # the gradients are right, and the loss is the last one's
    for part in parts:
        model.set_requires_gradient_sync(part is parts[-1])
        loss = model(**part).loss * labels_of(part) / labels_per_rank(parts)
        loss.backward()
    return loss.detach()

# %% tags=["wrong"] turn=2 says="Nothing is reduced"
def accumulate(model, parts):                   # each rank would step with its own gradients
    model.set_requires_gradient_sync(False)
    for part in parts:
        (loss := model(**part).loss).backward()
    return loss.detach()

# %% [markdown]
# **The price** of `set_requires_gradient_sync(False)`: until the last micro-batch each rank keeps the *full* gradients,
# 658 KiB here instead of a quarter. Where they don't fit, reduce after each micro-batch, which with two reduces twice
# the bytes: leave the switch alone, or give `Trainer`
# `accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}}`.
#
# Why does the turn compare norms? If all gradients are too large by the same factor, clipping and AdamW take nearly the
# same steps, and where the returned loss is right, losses show nothing. The norm does: **compare norms, too.**
#
# ## When it goes wrong
#
# | you see | cause | cure |
# |:--|:--|:--|
# | loss and norm are too large by ranks times micro-batches | the model ignores `num_items_in_batch` (BERT, T5) | override `compute_loss` as `ByLabels` does |
# | losses differ at step 1 | other samples (`Trainer` shuffles by its own seed), or a mean of means | `train_sampling_strategy="sequential"`; divide by all labels |
# | losses differ from step 2 or 3 on | a setting of the table of defaults was left out, or one program decays norm layers | set them all |
# | with dropout and `fsdp_config={"activation_checkpointing": True}`, a model learns less well | Accelerate 1.15 recomputes with `preserve_rng_state=False`: backward drops other numbers than forward | `TrainingArguments(activation_checkpointing=True)` |
#
# ## The rule
#
# `Trainer` for its datasets and callbacks, `fsdp_utils.train` for resuming by itself, your own loop for an unusual
# step. Then check three things: that it shards (`trainer.is_fsdp_enabled`, or `check_sharding(model)`), what a
# checkpoint holds, and that losses *and* gradient norms of a few steps equal those of a program you trust. What was
# found, with a `Trainer` made to shard but for the last row and T5:
#
# | | your own loop | `fsdp_utils.train` | `Trainer`, `fsdp=True` |
# |:--|:--|:--|:--|
# | the loss is | what you divide it by | the mean over all labels | the same for Llama; for BERT or T5 on 4 ranks 4 times as large |
# | learning rate, if you set none | 0.001 (`AdamW`) | 0.0003 | 0.00005 |
# | asked for bf16, it adds up gradients in | what you choose | float32 | bf16, unless you change it |
# | a checkpoint of LoRA holds | what you choose | adapters and base | adapters |
# | it resumes | by your code | by the same command | by `resume_from_checkpoint` |
# | on CPU ranks it trains with | FSDP2 | FSDP2 | DDP |

# %% jupyter={"source_hidden": true}
os.chdir(home)
shutil.rmtree(folder)

# %% [markdown]
# [← lesson 16](16_two_dimensions.ipynb) · [lesson 18 →](18_beyond_forward_and_backward.ipynb)
