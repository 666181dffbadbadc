# %% [markdown]
# # 17 · Fine-tune a real model, end to end, three ways
#
# Your model comes from transformers, and you can train it with a loop of your own, with this library's
# `fsdp_utils.train`, or with transformers' `Trainer`. In this lesson all three fine-tune the same small Llama
# on the same samples, once with all of its parameters and once with LoRA, which trains a few percent of them.
# You lay the losses over each other, count what a rank holds and sends, and see where the three differ.

# %% [markdown] tags=["card"]
# learn:
# - how `Trainer` uses FSDP2 through Accelerate, and how to see that it does
# - what LoRA changes under FSDP, to the byte, and what it doesn't
# - which loss makes three programs and any number of micro-batches agree
# - what each program does about checkpoints, precision and clipping
# needs: '[lesson 7](07_mixed_precision.ipynb) and [lesson 10](10_end_to_end.ipynb) · no GPU, no network'
# ranks: "4 on this machine. 2 or 3 work too: set `FSDP_RANKS=2` before you start JupyterLab."
# takes: a minute to run on 2 cores (AMD EPYC) · 30 minutes to read

# %% [markdown]
# **The question of this lesson:** three programs get the same weights, the same samples in the same order and
# the same learning rate. Are their losses equal? If they are, what else should make you choose one?

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
    above=["the same weights, samples, AdamW and clipping"],
    below=["torch's fully_shard (FSDP2): the same collectives and the same gradients?"],
    alt="Three programs between what they are given and torch's fully_shard, which all three call.",
)

# %% [markdown]
# The drawing shows the three programs in columns. The grey bands are what they share: the input above, and
# FSDP2 below. The rows in between say who does the work. DCP is `torch.distributed.checkpoint`, which you
# know from [lesson 8](08_local_state_dict_and_distributed_checkpoints.ipynb). Accelerate is the library
# under `Trainer` that decides how to distribute.
#
# ## In your own code
#
# The script below fine-tunes a Llama with LoRA under FSDP2. Save it as `train.py` and start it with
# `torchrun --nproc-per-node 4 train.py`. It needs four GPUs, or none, and prints a loss that falls. For real
# weights, replace `LlamaForCausalLM(config)` by `LlamaForCausalLM.from_pretrained(..., dtype=torch.float32)`.
# (peft 0.21 warns of a name that transformers has changed. The warning does no harm.)
#
# ```python
# import torch, torch.distributed as dist
# from peft import LoraConfig, get_peft_model
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
# from transformers import LlamaConfig, LlamaForCausalLM
#
# device = "cuda" if torch.cuda.is_available() else "cpu"
# dist.init_process_group("nccl" if device == "cuda" else "gloo")
# if device == "cuda":
#     torch.cuda.set_device(dist.get_node_local_rank())
# torch.manual_seed(0)                                  # the same weights on every rank
# config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=192, num_attention_heads=4)
# model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
# mesh = init_device_mesh(device, (dist.get_world_size(),))
# for part in [*model.to(device).get_base_model().model.layers, model]:     # adapters are in the blocks
#     fully_shard(part, mesh=mesh)
# optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
# torch.manual_seed(dist.get_rank())                    # other samples on each rank
# ids = torch.randint(256, (8, 32), device=device)      # your data
# for step in range(10):
#     loss = model(input_ids=ids, labels=ids).loss
#     loss.backward()
#     optimizer.step()
#     optimizer.zero_grad()
#     if dist.get_rank() == 0:
#         print(f"step {step + 1}: loss {loss.item():.4f}")
# dist.destroy_process_group()
# ```
#
# ## The model and the task
#
# No model hub is needed here. The folded cells below start the ranks, make a small Llama from a
# configuration, and teach it on rank 0 to write dates in digits: `7 march 1998>1998-03-07`. The weights and
# a tokenizer are saved as the folder `base`, in the same format as a model on the hub.

# %% jupyter={"source_hidden": true}
import os
import shutil
import tempfile
from pathlib import Path

from fsdp_utils.lessons.tables import Table
from fsdp_utils.lessons.turns import at_most, exactly, try_answers, turn
from fsdp_utils.notebook import ranks

home, folder = Path.cwd(), Path(tempfile.mkdtemp())
os.chdir(folder)                                # the ranks find finetune.py and base/ there
os.environ["OMP_NUM_THREADS"] = "1"             # as torchrun sets it
ranks.start()

# %% jupyter={"source_hidden": true}
# %%ranks
import sys
import warnings

import torch
import torch.distributed as dist
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from fsdp_utils.lessons import tasks

rank, world = dist.get_rank(), dist.get_world_size()
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
# peft 0.21 reads a name that transformers 5.23 has renamed
warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
sys.path.insert(0, "")                          # finetune.py will be in the working directory


def make_base(name, steps=120):
    """Teach a small Llama to write dates in digits; save it as on the hub. Returns the losses."""
    words = {"<pad>": tasks.PAD, "<end>": tasks.END, **tasks.ID_OF}
    characters = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    marks = {"pad_token": "<pad>", "eos_token": "<end>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=characters, **marks).save_pretrained(name)
    small = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4}
    tokens = {"pad_token_id": tasks.PAD, "eos_token_id": tasks.END, "bos_token_id": None}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=64, max_position_embeddings=64, **small, **tokens)
    model = transformers.LlamaForCausalLM(config)
    optimizer, task, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), tasks.dates_llama(), []
    for step in range(steps):
        loss = model(**task.batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(name)
    return losses


if rank == 0:
    losses = make_base("base")
    print(f"The base model's loss: {losses[0]:.1f} at the first step, {losses[-1]:.1f} at the last.")
dist.barrier()                                  # the others wait for the folder

# %% [markdown]
# The new task is the way back: `1998-03-07>7 march 1998`. The next cell writes it as a module, because
# `fsdp_utils.train` imports the task by name. For real weights, change `BASE` in your copy of this file to a
# Llama-like model on the hub, such as `"HuggingFaceTB/SmolLM2-135M"`. (The numbers and the checks of this
# lesson are those of the small model.)

# %%
# %%writefile finetune.py
from types import SimpleNamespace

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp_utils.lessons.tasks import date_pairs

BASE = "base"                                   # a folder, or the name of a model on the hub


def full():
    return AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)


def lora():
    torch.manual_seed(0)                        # the same adapters on every rank
    return get_peft_model(full(), LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))


def encode(pairs):
    """Dates in digits, to be continued in words: ids and labels, i64[dates, longest]."""
    tokenizer, rows = AutoTokenizer.from_pretrained(BASE), []
    for words, digits in pairs:
        question = tokenizer(f"{digits}>").input_ids
        answer = [*tokenizer(words, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        rows.append((question + answer, [-100] * len(question) + answer))     # -100: not in the loss
    ids, labels = ([torch.tensor(row[column]) for row in rows] for column in (0, 1))
    pad = torch.nn.utils.rnn.pad_sequence
    return {"input_ids": pad(ids, True, 0), "labels": pad(labels, True, -100)}


def task(build):
    chosen = [[pair for pair in pairs if " " in pair[0] and "," not in pair[0]] for pairs in date_pairs()]
    train, test = chosen                        # pairs that are spelled as in `7 march 1998`
    return SimpleNamespace(train=encode(train), test=encode(test), predicts_next=True, build=build)


def full_task():
    return task(full)


def lora_task():
    return task(lora)


# %% [markdown]
# `full` and `lora` build the two models. LoRA freezes the base model and adds to each chosen layer a product
# of two thin matrices, its **adapter**, which alone is trained; you wrote one in
# [lesson 9](09_child_tuning.ipynb). The second factor begins at zero, so at the first step both models
# compute the same. Labels of -100 are left out of the loss, so only answers count.
#
# `task` returns what `fsdp_utils.train` asks for: the samples, and the function that builds the model.
# `predicts_next` says that the output at each position is about the next label, as in any decoder.

# %% jupyter={"source_hidden": true}
# %%ranks
import contextlib
import json
import os
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import finetune
from fsdp_utils import shard
from fsdp_utils.lessons.probe import Probe, local
from fsdp_utils.train import DataConfig, OptimConfig, ParallelConfig, TrainConfig, rows_at
from fsdp_utils.train import train as train_program

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
BATCH, STEPS, LR, BETAS, CLIP = 24, 12, 3e-3, (0.9, 0.95), 1.0
data = finetune.task(None).train
program_log = Path("program.log").open("a")     # noqa: SIM115  what fsdp_utils.train would print
order = rows_at(0, BATCH * 16, len(data["labels"]), seed=0)      # i64[384]: the samples of 16 steps


def share(step, parts=1):
    """This rank's samples of a step, in so many micro-batches: a list of dicts of tensors."""
    rows = order[BATCH * step : BATCH * (step + 1)].view(parts, world, -1)[:, rank]
    return [{name: tensor[part].to(device) for name, tensor in data.items()} for part in rows]


def numel(model):
    return [sum(p.numel() for p in model.parameters() if p.requires_grad >= only) for only in (False, True)]


sizes = {how: numel(getattr(finetune, how)()) for how in ("full", "lora")}
tokenizer = transformers.AutoTokenizer.from_pretrained(finetune.BASE)
examples = ["".join(tokenizer.convert_ids_to_tokens(data["input_ids"][row])) for row in order[:3]]
lengths = [(part["labels"] != -100).sum().item() for part in share(0)]

# %% jupyter={"source_hidden": true}
sizes, lengths = ranks.get("sizes")[0], [counts[0] for counts in ranks.get("lengths")]
samples = [text.split("<end>")[0] for text in ranks.get("examples")[0]]
Table(
    ["model", "parameters", "of them trained"],
    [[how, *sizes[how]] for how in sizes],
    note=f"Samples: {'; '.join(samples)}. "
    f"Labels of each rank in the first step: {', '.join(map(str, lengths))}.",
)

# %% [markdown]
# Answers differ in length (`7 may 1998`, `30 september 2000`), so the ranks have unequal numbers of labels.
# A mean of the ranks' means would then weigh labels unequally, as [lesson 10](10_end_to_end.ipynb) showed.
#
# All three ways train for twelve steps of 24 samples, with AdamW, a constant learning rate of 0.003 and
# gradients clipped at norm 1. The folded cell above names these settings `STEPS`, `BATCH`, `LR`, `BETAS` and
# `CLIP`. Its function `share(step)` returns this rank's samples of a step as a list of micro-batches: here
# one, in turn 2 two.
#
# ## Way 1: a loop of your own
#
# `shard` calls `fully_shard` on each block and on the model. The loop has two lines that a loop on one
# process has not: the labels are counted over all ranks, and the loss is multiplied by the number of ranks.

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
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach()
    dist.all_reduce(loss)                                       # only for the curve
    return loss.item(), norm.full_tensor().item()


# %% [markdown]
# A Llama of transformers divides the sum of its losses by `num_items_in_batch`. Without that argument it
# divides by the labels of its own batch. Given the count over all ranks, each rank's loss is its part of the
# mean over all labels. FSDP averages gradients over the ranks, but these parts must be added up, so the loss
# is multiplied by `world`. `clip_grad_norm_` sees sharded gradients and computes the norm over all ranks.

# %%
# %%ranks
def adamw(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=LR, betas=BETAS, weight_decay=0.0)


def by_hand(model, steps=STEPS, policy=None):
    shard(model.to(device), mp_policy=policy)
    optimizer = adamw(model)
    return [plain_step(model, optimizer, share(step)) for step in range(steps)]


# %% [markdown]
# A `Probe` watches each run, whoever wrote its loop. It counts the bytes that a rank holds after step 2,
# those that its collectives handle in step 3, and the full parameters at once in step 4. The counts come
# later; first the losses.

# %%
# %%ranks
WAYS = ["a loop of your own", "fsdp_utils.train", "Trainer"]


def probed(how, train):
    """Train `finetune.full()` or `finetune.lora()`: the steps' losses and norms, and the probe."""
    model = getattr(finetune, how)()
    with Probe(model) as probe:
        return train(model), probe


runs = {(WAYS[0], how): probed(how, by_hand) for how in ("full", "lora")}

# %% jupyter={"source_hidden": true}
ways, curves_so_far = ranks.get("WAYS")[0], "{key: curve for key, (curve, _) in runs.items()}"


def lay_over(ways, curves):
    """The losses of these ways over each other, with all parameters and with LoRA."""
    fig, panels = plots.figure(2, width=9.0, height=2.8)
    looks = [
        {"color": plots.FAINT, "linewidth": 9, "solid_capstyle": "round"},
        {"color": plots.RANK_COLORS[0], "linewidth": 2},
        {"color": plots.RANK_COLORS[5], "linewidth": 2, "linestyle": ":"},
    ]
    for axes, (how, title) in zip(panels, {"full": "all parameters", "lora": "LoRA"}.items()):
        for way, look in zip(ways, looks):
            losses = [loss for loss, _ in curves[way, how]]
            axes.plot(range(1, len(losses) + 1), losses, label=way, **look)
        axes.set(title=title, xlabel="step", ylabel="loss", ylim=(0, 8.4))
    panels[0].legend(frameon=False)
    return plots.show(fig, alt=f"Losses over twelve steps, all parameters and LoRA: {', '.join(ways)}.")


lay_over(ways[:1], ranks.get(curves_so_far)[0])

# %% [markdown]
# At the first step the loss is above ln 64 = 4.2, that of a model that knows nothing: the base model is sure
# that digits follow. LoRA learns more slowly here, because it trains 4% of the parameters at the learning
# rate that suits all of them. The other two programs must reproduce these curves.
#
# ## Way 2: `fsdp_utils.train`
#
# In a terminal, [lesson 10](10_end_to_end.ipynb)'s program would be started like this:
#
# ```sh
# torchrun --nproc-per-node 4 -m fsdp_utils.train --out runs/lora --data.source finetune:lora_task \
#     --optim.lr 0.003 --optim.decay none --optim.weight_decay 0 --steps 12
# ```
#
# Here its function `train` runs on the ranks that are there already. Its log goes to a file, and so do the
# losses.

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
# `patch.object` hands the program a model that this lesson holds too, so that its bytes can be counted. The
# program shards it in place.

# %%
# %%ranks
runs |= {(WAYS[1], how): probed(how, partial(by_program, how)) for how in ("full", "lora")}

# %% jupyter={"source_hidden": true}
curves = ranks.get(curves_so_far)[0]
lay_over(ways[:2], curves)

# %% [markdown]
# The second curve lies on the first.
#
# ## Way 3: `Trainer`
#
# On GPUs under torchrun, `Trainer` needs one setting for FSDP2: `fsdp=True`. The others below repeat the
# settings of the first two ways. `forget`, which is folded, clears what an earlier run has left in this
# process; *When it goes wrong* shows why.

# %% jupyter={"source_hidden": true}
# %%ranks
from accelerate.state import AcceleratorState, GradientState


def forget():
    """Clear what the last Accelerator has left in this process: its classes and environment variables."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        os.environ.pop(name, None)


# %%
# %%ranks
from transformers import PrinterCallback, Trainer, TrainingArguments


def make_trainer(model, steps=STEPS, kind=Trainer, parts=1, **more):
    forget()
    args = TrainingArguments(
        fsdp=True, fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"},       # the latter for checkpoints
        use_cpu=not on_gpu, max_steps=steps, per_device_train_batch_size=BATCH // world // parts,
        gradient_accumulation_steps=parts, train_sampling_strategy="sequential",        # not shuffled
        learning_rate=LR, lr_scheduler_type="constant", adam_beta1=BETAS[0], adam_beta2=BETAS[1],
        max_grad_norm=CLIP, logging_steps=1, report_to=[], disable_tqdm=True,
        **{"save_strategy": "no", **more},
    )                                                           # fmt: skip
    rows = [{name: tensor[row] for name, tensor in data.items()} for row in order.tolist()]
    trainer = kind(model=model, args=args, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)                    # it prints what log_history holds
    return trainer


# %% [markdown]
# `Trainer` passes `fsdp=True` on to Accelerate, which looks at the type of the devices first. The branch that
# switches FSDP on (in `AcceleratorState.__init__`, file `accelerate/state.py`) lists GPUs and other
# accelerators, and leaves out `MULTI_CPU`. What happens on CPU ranks?

# %%
# %%ranks
with Probe(model := finetune.full()) as unsharded:
    trainer = make_trainer(model, steps=3, ddp_find_unused_parameters=False)
    trainer.train()
kind_on_cpus = str(trainer.accelerator.distributed_type).split(".")[1]
held_unsharded = unsharded.held[0]
wrapped_as = type(trainer.model_wrapped).__name__

# %% jupyter={"source_hidden": true}
kind_on_cpus, wrapped_as = ranks.get("(kind_on_cpus, wrapped_as)")[0]
Table(
    ["fsdp=True, on these ranks", "found"],
    [
        ["Accelerate's type of distribution", kind_on_cpus],
        ["class of the model that it trains", wrapped_as],
        ["KiB of parameters on each rank", ranks.get("held_unsharded")[0] // 2**10],
        ["KiB of parameters in the model", 4 * sizes["full"][0] // 2**10],
    ],
)

# %% [markdown]
# `fsdp=True` was accepted without a message, and the ranks trained with DDP: each holds the whole model. So
# a test of your training on CPUs tests DDP, while on GPUs the same script runs FSDP2. Look at
# `trainer.is_fsdp_enabled`, or at the class of the model, rather than at your settings.
#
# The next cell is needed on CPU ranks alone. It makes the few assignments of the skipped branch in a method
# that `Trainer` has for changes to its Accelerator; the rest of `Trainer` and Accelerate then runs as on
# GPUs. The type is set in two places, because a new `AcceleratorState` copies it from `PartialState`.

# %%
# %%ranks
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


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
def by_trainer(model, steps=STEPS, resume=None, policy=None, **more):
    trainer = make_trainer(model, steps, TrainerOnCpus, **more)
    if policy is not None:                                      # for *Precision*, below
        trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = policy
    trainer.train(resume_from_checkpoint=resume)
    return [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]


for how in ("full", "lora"):
    saves = {"save_strategy": "steps", "save_steps": STEPS, "output_dir": f"trainer-{how}"}
    runs[WAYS[2], how] = probed(how, partial(by_trainer, **saves))

# %% [markdown]
# ## Three ways, one curve

# %% jupyter={"source_hidden": true}
curves = ranks.get(curves_so_far)[0]
lay_over(ways, curves)

# %% [markdown]
# Three curves lie on each other in each panel. They agree within 0.0001 at every step; the rest is rounding.
#
# **Clipping** is part of this. The norms of the gradients, taken before clipping, are above 1 at most steps,
# so every run was clipped, and they agree within 0.001. Hence all three take the norm of the whole gradient.
# A norm of a rank's own shard would be smaller, and another one on each rank. Each uses a function that
# understands sharded gradients: torch's `clip_grad_norm_` in your loop, torch's `get_total_norm` in
# `fsdp_utils.train`, and `Accelerator.clip_grad_norm_` in `Trainer`.

# %% tags=["check"]
def apart(how, column):
    """The largest difference of a loss (column 0) or a norm (1) from that of the loop of your own."""
    mine = curves[ways[0], how]
    return max(abs(a[column] - b[column]) for way in ways[1:] for a, b in zip(curves[way, how], mine))


for how in ("full", "lora"):
    assert len(curves["Trainer", how]) == 12
    assert apart(how, 0) < 1e-4, apart(how, 0)
    assert apart(how, 1) < 1e-3, apart(how, 1)
    assert sum(norm > 1 for _, norm in curves["Trainer", how]) > 6, curves["Trainer", how]
    assert curves["Trainer", how][-1][0] < 0.9 * curves["Trainer", how][0][0]
print("Checked: losses within 0.0001 and norms within 0.001 of each other, full and LoRA.")

# %% [markdown]
# ## What a rank holds and sends
#
# **Predict:** LoRA trains 4% of the parameters. By how much do the bytes at rest shrink, and by how much
# those that are sent?

# %% tags=["held"] jupyter={"source_hidden": true}
rows = ranks.get("{key: probe.row() for key, (_, probe) in runs.items()}")[0]
labels = {"full": "all parameters", "lora": "LoRA"}
kib = {f"{way}, {labels[how]}": [n / 2**10 for n in rows[way, how]] for how in labels for way in ways}
plots.amounts(
    {
        "at rest": {
            run: {"parameters": row[0], "gradients": row[1], "AdamW's averages": row[2]}
            for run, row in kib.items()
        },
        "in one step": {run: {"gathered": row[3], "reduced": row[4]} for run, row in kib.items()},
        "full at once": {run: {"full parameters": row[5]} for run, row in kib.items()},
    },
    unit="KiB",
    alt="What rank 0 holds at rest, gathers and reduces in a step, and has in full at once, in six runs.",
)

# %% [markdown]
# The figure counts bytes of rank 0. **At rest** are its shards, counted after a step of the optimizer.
# **In one step** are the bytes that the all-gathers produce and those that the reduce-scatters take in.
# **Full at once** are the most full parameters at one moment, without the buffers of the all-gathers.
#
# Compare LoRA with all parameters:
#
# - **Gradients, averages and what is reduced** shrink to 4%, because FSDP2 reduces the gradients of
#   parameters that require one, and of no others.
# - **Parameters and what is gathered** grow a little, by the adapters. Frozen weights are sharded, and are
#   gathered for forward and for backward as before. So under FSDP, LoRA saves 71% of the bytes at rest, and
#   30% of those that the collectives handle.
#
# And compare the ways: at rest they are equal. `Trainer` gathers 1% more and has 7% less in full at once,
# because Accelerate chooses its units differently (`fsdp2_prepare_model` in its `utils/fsdp_utils.py`).
# `shard` leaves embedding, last norm and head in the model's own unit, which is gathered once and kept until
# backward ends. Accelerate makes two units of them. The embedding is freed after forward and gathered a
# second time; last norm and head are gathered once and freed when their own backward is done.

# %% tags=["check"]
for way in ways:
    full, lora = rows[way, "full"], rows[way, "lora"]
    assert lora[4] < 0.05 * full[4]
    assert full[3] < lora[3] < 1.1 * full[3]
    assert 0.24 < sum(lora[:3]) / sum(full[:3]) < 0.32
    assert 0.28 < 1 - (lora[3] + lora[4]) / (full[3] + full[4]) < 0.34
    for how in ("full", "lora"):
        assert rows[way, how][:3] == rows[ways[0], how][:3]
for how in ("full", "lora"):
    hand, trainer = rows[ways[0], how], rows["Trainer", how]
    assert rows["fsdp_utils.train", how] == hand
    assert 1 < trainer[3] / hand[3] < 1.03
    assert trainer[5] < hand[5]
print("Checked: the same bytes at rest; Trainer gathers up to 3% more, and has less at once.")

# %% [markdown]
# ## Your turn 1 · Train and save adapters only
#
# peft froze the base model for you. Here its work is undone: every parameter of the model you get requires a
# gradient. Write two functions:
#
# - `prepare` shards the model with `shard(model)`, so that only the adapters are trained, and returns the
#   optimizer: `torch.optim.AdamW` with `lr=LR, betas=BETAS, weight_decay=0.0`. Parameters of adapters have
#   `lora_` in their names.
# - `to_save` returns the adapters for a checkpoint: complete tensors by name, on every rank.
#
# Edit the next cell, then run it and the two folded cells below it.
#
# <details><summary>Hint</summary>
#
# FSDP2 reduces the gradients of what requires one. A sharded parameter is a `DTensor`, and
# `DTensor.full_tensor()` is a collective: every rank calls it for the same tensors in the same order.
#
# </details>

# %% tags=["exercise"]
# %%ranks
def prepare(model):                             # not sharded; everything requires a gradient
    return None                                 # your lines here: shard it, and return the optimizer


def to_save(model):                             # sharded, after some steps
    return None                                 # your lines here: {name: tensor}


# %% jupyter={"source_hidden": true}
# %%ranks
from fsdp_utils.lessons.together import run_together

adapters_probe, adapters_curve = runs[WAYS[0], "lora"][1], runs[WAYS[0], "lora"][0]


def score_adapters(prepare, to_save):
    """Four steps with what `prepare` made, then the checkpoint."""
    model = finetune.lora().to(device).requires_grad_(True)
    optimizer, parted = run_together(prepare, model)
    if optimizer is None:
        return {"problem": parted} if parted else None
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    result = {"the model is sharded": isinstance(model, FSDPModule), "tensors trained": len(trained)}

    def four_steps():                           # none on a rank that has nothing to train
        steps = range(4 if all(result.values()) else 0)
        return [plain_step(model, optimizer, share(step))[0] for step in steps]

    with Probe(model) as probe:
        losses, parted = run_together(four_steps)
    if parted:
        return {"problem": f"`prepare` has left the ranks unequal, which shows in the steps. {parted}"}
    if not losses:
        return result
    wanted = {name: p.full_tensor() for name, p in model.named_parameters() if "lora_" in name}
    saved, parted = run_together(to_save, model)
    if saved is None:
        return {"problem": parted} if parted else None
    saved = dict(saved)
    short = {name.replace(".default", ""): tensor for name, tensor in saved.items()}
    pairs = [(tensor, short.get(name.replace(".default", ""))) for name, tensor in wanted.items()]
    return result | {
        "losses as with peft's own freezing": all(
            abs(mine - theirs) < 1e-4 for mine, (theirs, _) in zip(losses, adapters_curve)
        ),
        "KiB of averages on a rank": round(probe.held[2] / 2**10, 1),
        "KiB reduced in a step": round(probe.sent("reduce_scatter") / 2**10, 1),
        "KiB saved": round(sum(t.nbytes for t in local(saved.values())) / 2**10, 1),
        "saved adapters are complete": all(
            mine is not None and not isinstance(mine, DTensor) and torch.equal(mine, full)
            for full, mine in pairs
        ),
    }

# %% jupyter={"source_hidden": true}
adapters = ranks.get("(adapters_probe.held[2], adapters_probe.sent('reduce_scatter'))")[0]
count = ranks.get("sum(p.requires_grad for p in finetune.lora().parameters())")[0]
turn(
    1,
    "score_adapters(prepare, to_save)",
    {
        "the model is sharded": exactly(
            True, otherwise="`prepare` has not sharded the model: call `shard(model)`."
        ),
        "tensors trained": exactly(
            count,
            otherwise="Adapters require a gradient, and no other parameter: set `requires_grad_` by name.",
        ),
        "losses as with peft's own freezing": exactly(
            True,
            otherwise="The losses differ. Check three things: the optimizer has the adapters alone; it was "
            "made after sharding, which replaces the parameters; and the base model requires no gradients, "
            "because clipping counts the gradients of all parameters.",
        ),
        "KiB of averages on a rank": at_most(
            round(adapters[0] / 2**10, 1),
            otherwise="AdamW keeps averages of parameters that should be frozen.",
        ),
        "KiB reduced in a step": at_most(
            round(adapters[1] / 2**10, 1),
            otherwise="Gradients of frozen parameters are computed and reduced: the optimizer leaves them "
            "out, but they still require a gradient.",
        ),
        "KiB saved": exactly(
            4 * (sizes["lora"][1]) / 2**10, otherwise="What is saved has another size than the adapters."
        ),
        "saved adapters are complete": exactly(
            True, otherwise="An adapter is missing, or is this rank's shard of it: save the full tensors."
        ),
    },
)

# %% tags=["solution"] turn=1
# %%ranks
def prepare(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    shard(model)
    return adamw(model)                         # of the parameters that require a gradient


def to_save(model):
    return {name: p.full_tensor() for name, p in model.named_parameters() if p.requires_grad}

# %% tags=["wrong"] turn=1
# %%ranks
def prepare(model):                             # the optimizer leaves the base out, and FSDP does not know
    shard(model)
    adapters = [p for name, p in model.named_parameters() if "lora_" in name]
    return torch.optim.AdamW(adapters, lr=LR, betas=BETAS, weight_decay=0.0)


def to_save(model):
    return {name: p.full_tensor() for name, p in model.named_parameters() if "lora_" in name}

# %% tags=["wrong"] turn=1
# %%ranks
def prepare(model):                             # the optimizer before sharding
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    optimizer = adamw(model)
    shard(model)
    return optimizer


def to_save(model):
    return {name: p.full_tensor() for name, p in model.named_parameters() if "lora_" in name}

# %% tags=["wrong"] turn=1
# %%ranks
def prepare(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    shard(model)
    return adamw(model)


def to_save(model):                             # shards, and the base model with them
    return model.state_dict()

# %% tags=["wrong"] turn=1
# %%ranks
def prepare(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    shard(model)
    return adamw(model)


def to_save(model):                             # this rank's shards
    return {name: p.to_local() for name, p in model.named_parameters() if p.requires_grad}

# %% tags=["wrong"] turn=1
# %%ranks
def prepare(model):                             # not sharded
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return adamw(model)


def to_save(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}

# %% tags=["wrong"] turn=1
# %%ranks
def prepare(model):                             # frozen on one rank only: the ranks reduce different sizes
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or rank > 0)
    shard(model)
    return adamw(model)


def to_save(model):
    return {name: p.full_tensor() for name, p in model.named_parameters() if "lora_" in name}

# %% tags=["wrong"] turn=1
# %%ranks
def prepare(model):                             # everything is frozen
    model.requires_grad_(False)
    shard(model)
    return torch.optim.AdamW(model.parameters(), lr=LR)


def to_save(model):
    return {}

# %% [markdown]
# `requires_grad` decides what FSDP2 reduces. What the optimizer is given does not: with the adapters alone
# in the optimizer, and no parameter frozen, all gradients are still computed and reduced.
#
# ## Checkpoints
#
# `fsdp_utils.train` and `Trainer` have saved their last step. Your loop needs a few lines with
# `torch.distributed.checkpoint`. `ignore_frozen_params` leaves out what is not trained, and `strict=False`
# accepts when loading that it is missing.

# %%
# %%ranks
trained_only = StateDictOptions(ignore_frozen_params=True, strict=False)


def save(model, optimizer, step, out):
    weights, moments = get_state_dict(model, optimizer, options=trained_only)
    dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=out)


def load(model, optimizer, out):
    weights, moments = get_state_dict(model, optimizer, options=trained_only)
    state = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=out)                          # on any number of ranks
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
                   options=trained_only)                        # fmt: skip
    return state["step"]


for how in ("full", "lora"):
    probe = runs[WAYS[0], how][1]                               # holds the model and the optimizer of the run
    save(probe.model, probe.optimizer, STEPS, f"loop-{how}")

# %% [markdown]
# Each way now starts again from its checkpoint of the LoRA run and trains two steps more. For comparison,
# your loop also trains fourteen steps without a stop.

# %% jupyter={"source_hidden": true}
# %%ranks
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils._pytree import tree_leaves


def tensor_bytes(out):
    """Bytes of the tensors in all files of a checkpoint: DCP's, torch.save's and safetensors'."""
    total = 0
    for path in Path(out).rglob("*"):
        if path.name == ".metadata":
            for entry in FileSystemReader(path.parent).read_metadata().state_dict_metadata.values():
                if isinstance(entry, TensorStorageMetadata) and entry.size.numel() > 1:     # no counts
                    total += entry.size.numel() * entry.properties.dtype.itemsize
        elif path.suffix in (".bin", ".safetensors") and path.name != "training_args.bin":
            read = load_file if path.suffix == ".safetensors" else torch.load
            total += sum(t.nbytes for t in tree_leaves(read(path)) if torch.is_tensor(t) and t.numel() > 1)
    return total


folders = dict(zip(WAYS, ("loop", "program", "trainer")))
saved = {(way, how): tensor_bytes(f"{folders[way]}-{how}") for way, how in runs}
dist.barrier()                                  # before a resumed run writes into these folders

# %%
# %%ranks
def resume_by_hand(model, steps, out):
    shard(model.to(device))
    optimizer = adamw(model)
    begin = load(model, optimizer, out)
    return [plain_step(model, optimizer, share(step)) for step in range(begin, steps)]


without_stop = by_hand(finetune.lora(), 14)
newest = "trainer-lora/checkpoint-12"
resumed = {
    "a loop of your own": resume_by_hand(finetune.lora(), 14, "loop-lora"),
    "fsdp_utils.train": by_program("lora", finetune.lora(), 14),
    "Trainer": by_trainer(finetune.lora(), 14, resume=newest, save_steps=12),
}

# %% jupyter={"source_hidden": true}
saved, resumed, without_stop = ranks.get("(saved, resumed, without_stop)")[0]
trained = {how: 3 * 4 * sizes[how][1] / 2**10 for how in labels}     # with AdamW's two averages, in KiB
rest = {run: nbytes / 2**10 - trained[run[1]] for run, nbytes in saved.items()}
plots.amounts(
    {
        label: {way: {"trained, and its averages": trained[how], "the rest": rest[way, how]} for way in ways}
        for how, label in labels.items()
    },
    unit="KiB",
    alt="Bytes of the tensors in a checkpoint of each way, with all parameters and with LoRA.",
)

# %% [markdown]
# The figure counts the tensors of one checkpoint. For LoRA they differ by a factor of ten: `Trainer` and your
# loop save the adapters and their two averages, while `fsdp_utils.train` saves the frozen base model as well.
# Such a checkpoint needs no base model beside it, and is at least as large as the model.
#
# All three continue as if they had not stopped: the losses of steps 13 and 14 are those of the run without a
# stop, so weights, averages and the position in the data are restored.
#
# `Trainer` lets each rank write its shards because of the setting `SHARDED_STATE_DICT`. Its default,
# `FULL_STATE_DICT`, gathers everything on rank 0, which [lesson 3](03_full_state_dict.ipynb) measures. To
# resume in the middle of the data, `Trainer` goes through the batches before that point and skips them;
# `fsdp_utils.train` computes the position from the count of samples.

# %% tags=["check"]
for way in ways:
    assert max(abs(a[0] - b[0]) for a, b in zip(resumed[way][-2:], without_stop[-2:])) < 1e-4
    assert saved[way, "full"] >= 3 * 4 * sizes["full"][0]
adapters_saved = 3 * 4 * sizes["lora"][1]
assert saved[ways[0], "lora"] == saved["Trainer", "lora"] == adapters_saved
assert saved["fsdp_utils.train", "lora"] == 4 * sizes["lora"][0] + adapters_saved * 2 // 3
print("Checked: steps 13 and 14 are those of the run without a stop; two ways save adapters alone.")

# %% [markdown]
# ## Precision
#
# **Predict:** all three are asked for bf16, the loop by the policy that [lesson
# 7](07_mixed_precision.ipynb) recommends. Which bytes get fewer, and is it the same in all three? A fourth
# run gives the loop's policy to `Trainer`.

# %%
# %%ranks
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
trainings = {
    "a loop of your own": partial(by_hand, steps=4, policy=policy),
    "fsdp_utils.train": partial(by_program, "full", steps=4, precision="bf16", out="half"),
    "Trainer": partial(by_trainer, steps=4, bf16=True),
    "Trainer, with the loop's policy": partial(by_trainer, steps=4, bf16=True, policy=policy),
}
halves = {way: probed("full", train) for way, train in trainings.items()}

# %% jupyter={"source_hidden": true}
# %%ranks
def element(way, kind):
    """Bytes of one element as it is sent, from those of the run in float32."""
    whole = runs[way.partition(",")[0], "full"][1]
    return round(4 * halves[way][1].sent(kind) / whole.sent(kind), 2)


precision = {
    way: (
        str(next(halves[way][1].model.parameters()).dtype).removeprefix("torch."),
        element(way, "all_gather"),
        element(way, "reduce_scatter"),
        max(abs(half[0] - whole[0]) for half, whole in zip(halves[way][0], runs[WAYS[0], "full"][0])),
    )
    for way in halves
}

# %% jupyter={"source_hidden": true}
precision = ranks.get("precision")[0]
Table(
    ["asked for bf16", "parameters at rest", "bytes gathered", "bytes reduced"],
    [[way, *precision[way][:3]] for way in precision],
    note="Bytes are those of one element on its way between ranks.",
)

# %% [markdown]
# All three keep float32 parameters and gather them in bf16. The gradients differ: Accelerate sets
# `reduce_dtype` to bf16 as well, so `Trainer` adds up the gradients of all ranks in bf16. That halves the
# bytes, and with many ranks it loses digits, as [lesson 7](07_mixed_precision.ipynb) measures. The other two
# add up in float32. In transformers 5.23 `Trainer` has no setting for this. As the last row shows, you can
# replace the policy of its plugin between making the `Trainer` and `train()`, as `by_trainer` does.

# %% tags=["check"]
for way, (kept_in, gathered, reduced, difference) in precision.items():
    assert (kept_in, gathered) == ("float32", 2.0)
    assert reduced == (2.0 if way == "Trainer" else 4.0)
    assert difference < 0.5, difference
print("Checked: gathered in bf16 by all; reduced in bf16 by Trainer alone, and not with the loop's policy.")

# %% [markdown]
# ## Defaults that differ
#
# The losses agree because every setting above was given. The table shows what the three do when a setting is
# left out, read from the installed versions; the loop's column is `torch.optim.AdamW` with its defaults.

# %% jupyter={"source_hidden": true}
# %%ranks
import dataclasses
import inspect

import accelerate
import peft

left_out = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
adamw_defaults = {name: p.default for name, p in inspect.signature(torch.optim.AdamW).parameters.items()}
ours = OptimConfig()
trainer = make_trainer(model := finetune.full(), 1, TrainerOnCpus, weight_decay=0.1)
trainer.train()
decayed = sum(len(group["params"]) for group in trainer.optimizer.param_groups if group["weight_decay"])
tensors = len(list(model.parameters()))
schedule = left_out["lr_scheduler_type"]
trainers_betas = f"({left_out['adam_beta1']}, {left_out['adam_beta2']})"
defaults = [
    ["learning rate", adamw_defaults["lr"], ours.lr, left_out["learning_rate"]],
    ["its schedule", "none", ours.decay, str(getattr(schedule, "value", schedule))],
    ["betas", str(adamw_defaults["betas"]), str(ours.betas), trainers_betas],
    ["weight decay", adamw_defaults["weight_decay"], ours.weight_decay, left_out["weight_decay"]],
    [f"tensors that decay, of {tensors}", tensors, tensors, decayed],
    ["largest norm of the gradient", "not clipped", ours.clip, left_out["max_grad_norm"]],
    ["order of the samples", "yours", "by the seed", left_out["train_sampling_strategy"]],
]
versions = [f"{module.__name__} {module.__version__}" for module in (transformers, accelerate, peft)]

# %% jupyter={"source_hidden": true}
Table(["if left out", *ways], ranks.get("defaults")[0])

# %% [markdown]
# Set every one of these before you compare two programs. The fifth row is the easiest to miss: once weight
# decay is on, `Trainer` exempts norms and biases, and the other two don't.
#
# ## Your turn 2 · Accumulate as Trainer does
#
# `plain_step` can compute one micro-batch. Write `accumulate`, which takes a list of this rank's
# micro-batches, runs forward and backward on each, and returns this rank's part of the loss: a tensor without
# gradient, such that the parts of all ranks add up to the mean over all labels of the step. The gradients
# must be those of the same mean, and must be reduced once. Edit the next cell, then run it and the two folded
# cells below it.
#
# <details><summary>Hint</summary>
#
# `total_labels(parts)` counts over micro-batches and ranks. `model.set_requires_gradient_sync(False)` makes
# the next backward keep its gradients on this rank, until it is set to True again.
#
# </details>

# %% tags=["exercise"]
# %%ranks
def accumulate(model, parts):
    return None                                 # your lines here


# %% tags=["accumulate"] jupyter={"source_hidden": true}
# %%ranks
with Probe(model := finetune.full()) as accumulated:
    trainers = by_trainer(model, 4, parts=2)


def score_accumulate(accumulate):
    """Four steps of two micro-batches each, beside Trainer's."""
    model = finetune.full()
    shard(model.to(device))
    optimizer, curve = adamw(model), []
    with Probe(model) as probe:
        for step in range(4):
            part, parted = run_together(accumulate, model, share(step, parts=2))
            if part is None:
                return {"problem": parted} if parted else None
            loss = torch.as_tensor(part, dtype=torch.float32).detach().clone()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            norm = norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss)
            curve.append((loss.item(), norm))
    return {
        "loss of step 1, away from Trainer's": round(abs(curve[0][0] - trainers[0][0]), 3),
        "norm of step 1, divided by Trainer's": round(curve[0][1] / trainers[0][1], 3),
        "losses of steps 2 to 4 as Trainer's": all(
            abs(a[0] - b[0]) < 1e-3 for a, b in zip(curve[1:], trainers[1:])
        ),
        "KiB reduced in a step": round(probe.sent("reduce_scatter") / 2**10, 1),
    }

# %% jupyter={"source_hidden": true}
once = ranks.get("round(runs[WAYS[0], 'full'][1].sent('reduce_scatter') / 2**10, 1)")[0]
turn(
    2,
    "score_accumulate(accumulate)",
    {
        "loss of step 1, away from Trainer's": exactly(
            0,
            otherwise="The parts do not add up to the mean over all labels: divide each micro-batch's sum by "
            "the labels of all micro-batches on all ranks.",
        ),
        "norm of step 1, divided by Trainer's": exactly(
            1,
            otherwise="The gradient is not that of the mean over all labels of the step. FSDP divides the "
            "sum of the ranks' gradients by the number of ranks.",
        ),
        "losses of steps 2 to 4 as Trainer's": exactly(
            True, otherwise="The steps after the first one differ."
        ),
        "KiB reduced in a step": at_most(
            once, otherwise="Each micro-batch reduces all gradients: only the last one has to."
        ),
    },
)

# %% tags=["solution"] turn=2
# %%ranks
def accumulate(model, parts):
    labels, mine = total_labels(parts), 0.0
    for part in parts:
        model.set_requires_gradient_sync(part is parts[-1])
        loss = model(**part, num_items_in_batch=labels).loss
        (loss * world).backward()
        mine += loss.detach()
    return mine

# %% tags=["wrong"] turn=2
# %%ranks
def accumulate(model, parts):                   # the mean of the means
    mine = 0.0
    for part in parts:
        model.set_requires_gradient_sync(part is parts[-1])
        loss = model(**part).loss / len(parts)
        loss.backward()
        mine += loss.detach() / world
    return mine

# %% tags=["wrong"] turn=2
# %%ranks
def accumulate(model, parts):                   # the labels of this rank alone
    labels, mine = sum((part["labels"] != -100).sum() for part in parts), 0.0
    for part in parts:
        model.set_requires_gradient_sync(part is parts[-1])
        loss = model(**part, num_items_in_batch=labels).loss
        loss.backward()
        mine += loss.detach() / world
    return mine

# %% tags=["wrong"] turn=2
# %%ranks
def accumulate(model, parts):                   # without the number of ranks
    labels, mine = total_labels(parts), 0.0
    for part in parts:
        model.set_requires_gradient_sync(part is parts[-1])
        loss = model(**part, num_items_in_batch=labels).loss
        loss.backward()
        mine += loss.detach()
    return mine

# %% tags=["wrong"] turn=2
# %%ranks
def accumulate(model, parts):                   # reduced at each micro-batch
    labels, mine = total_labels(parts), 0.0
    for part in parts:
        loss = model(**part, num_items_in_batch=labels).loss
        (loss * world).backward()
        mine += loss.detach()
    return mine

# %% tags=["wrong"] turn=2
# %%ranks
def accumulate(model, parts):                   # never reduced: each rank steps with its own gradients
    labels, mine = total_labels(parts), 0.0
    model.set_requires_gradient_sync(False)
    for part in parts:
        loss = model(**part, num_items_in_batch=labels).loss
        (loss * world).backward()
        mine += loss.detach()
    return mine

# %% [markdown]
# With the count over all micro-batches and ranks, the losses are those of one micro-batch, too: how a step is
# divided makes no difference. `Trainer` counts the same labels as `num_items_in_batch`, gathered over the
# ranks because `average_tokens_across_devices` is True by default, and multiplies the loss by the number of
# ranks, as you did. `fsdp_utils.train` weighs each micro-batch by its labels.
#
# Leave out `* world`, and the losses here are still `Trainer`'s within 0.001: all gradients are too small by
# one factor, which AdamW nearly cancels ([lesson 0](00_fsdp_from_scratch.ipynb)). The norm shows it. So
# compare norms, too.

# %% tags=["check"]
try_answers(17)
split, whole = ranks.get("(trainers, runs['Trainer', 'full'][0][:4])")[0]
probes = "(accumulated, runs['Trainer', 'full'][1])"
reduced = ranks.get(f"[probe.sent('reduce_scatter') for probe in {probes}]")[0]
assert max(abs(a[0] - b[0]) for a, b in zip(split, whole)) < 1e-4
assert reduced[0] == reduced[1], reduced
print("Checked: Trainer has the same losses with one and with two micro-batches, and reduces once.")

# %% [markdown]
# ## When it goes wrong
#
# Accelerate keeps its state in class attributes and environment variables of the process. `TrainingArguments`
# clears the classes for its own run. An `Accelerator` that you make yourself meets what the last run left:

# %%
# %%ranks
from accelerate import Accelerator

try:
    Accelerator(cpu=not on_gpu, mixed_precision="bf16")         # the state is that of the last run above
except ValueError as error:
    print(str(error).partition(",")[0])
print("ACCELERATE_USE_FSDP is still", os.environ.get("ACCELERATE_USE_FSDP"))

# %% [markdown]
# What you see, why, and what helps:
#
# - **`AcceleratorState has already been initialized`.** As above: the last run had another precision. Start a
#   new process, or do what the folded `forget()` of this lesson does.
# - **A run without `fsdp=True` is sharded, after one with it.** On GPUs, `ACCELERATE_USE_FSDP` switches FSDP
#   on (FSDP1, unless `FSDP_VERSION` is 2), and an earlier run in this process has set it. Same cure.
# - **`fsdp=True`, and each rank holds the whole model.** Accelerate does not switch FSDP on for this type of
#   device, and says nothing. Look at `trainer.is_fsdp_enabled`.
# - **Losses differ from step 1 on.** Other samples: `Trainer` shuffles with its own seed unless
#   `train_sampling_strategy="sequential"`. Or a mean of means, as in turn 2.
# - **Losses differ from step 2 on, a little.** Weight decay on norms, betas, or a schedule that was left out.
# - **With dropout, a model learns less well under `activation_checkpointing` of `fsdp_config`.** Accelerate
#   (1.15) recomputes with `preserve_rng_state=False`, so backward drops other numbers than forward did. The
#   losses are right and the gradients are not: [lesson 2](02_activation_checkpointing.ipynb) shows a block
#   whose gradients are wrong by more than 10%. Use the argument `activation_checkpointing` of
#   `TrainingArguments` itself.
# - **LoRA, and the links are as busy as before.** The frozen weights are still gathered twice in each step.
#   If they fit, keep them after forward with `reshard_after_forward=False`, or use DDP.
#
# ## Which one?
#
# | | a loop of your own | `fsdp_utils.train` | `Trainer` |
# |:--|:--|:--|:--|
# | losses and gradients | equal | equal | equal |
# | bytes at rest | equal | equal | equal |
# | bytes gathered | equal | equal | 1% more, with 7% less in full at once |
# | clipping | if you call it; by the whole norm | at 1; by the whole norm | at 1; by the whole norm |
# | checkpoint of LoRA | what you choose; here adapters | adapters and base | adapters |
# | started again, it resumes | if you write that | by itself | if you pass `resume_from_checkpoint` |
# | bf16: gradients are added up in | what you choose; here float32 | float32 | bf16, or as you replace it |
# | on CPU ranks | FSDP2 | FSDP2 | DDP, until you add a few lines |
#
# Losses and memory at rest are no reason to prefer one. What is left:
#
# - **`Trainer`**, if you already use transformers' datasets, callbacks and reports, and train on GPUs. You
#   maintain no loop. Set `SHARDED_STATE_DICT` for a large model, and decide on the dtype of the reduction.
# - **`fsdp_utils.train`**, if the run must survive interruptions: the same command resumes it, on another
#   number of ranks too ([lesson 10](10_end_to_end.ipynb)).
# - **A loop of your own**, if a step is more than one loss and one optimizer, or if you want to choose the
#   units, the precision and what is saved. You have seen how few lines it is; you also maintain them.
#
# `Trainer` can use this library too: `fsdp_utils.integrations.transformers` has callbacks, one that reports
# memory and one that saves and resumes by `save_distributed`.
#
# ## Claims, then and now

# %% jupyter={"source_hidden": true}
part = sizes["full"][0] / sizes["lora"][1]
at_rest = sum(rows[ways[0], "full"][:3]) / sum(rows[ways[0], "lora"][:3])
lesson.claims(
    17,
    {
        "lora-memory": f"Here {part:.0f} times fewer parameters are trained, as the model is small and its "
        f"adapters are not. A rank holds {at_rest:.1f} times less at rest: 4 of 16 bytes per parameter stay.",
        "accumulation-equivalent": "True again for `Trainer`: with the labels counted over micro-batches and "
        "ranks, its losses with one micro-batch and with two agree within 0.0001.",
    },
)

# %% [markdown]
# ## Takeaways
#
# - Three programs have the same losses if they get the same samples, the same settings and the same
#   denominator: the labels of all micro-batches on all ranks.
# - `Trainer` trains with FSDP2 where Accelerate knows the device. On CPU ranks that takes a few lines of your
#   own; without them it trains with DDP, and no message says so.
# - Under FSDP, LoRA shrinks gradients, averages, what is reduced and what is saved. It does not shrink what
#   is gathered.
# - With bf16, `Trainer` also adds up gradients in bf16. Its plugin's policy can be replaced before `train()`.
# - Choose by who maintains the loop, what a checkpoint holds, and how a run resumes.

# %% jupyter={"source_hidden": true}
os.chdir(home)
shutil.rmtree(folder)

# %% [markdown]
# ## Next
#
# This was the last lesson. The program of [lesson 10](10_end_to_end.ipynb) is where your own model goes.
#
# [← lesson 16](16_two_dimensions.ipynb)
