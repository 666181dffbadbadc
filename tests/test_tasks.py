"""The tasks are seeded, split without leakage, cut fairly among ranks, and can be learnt."""

import pytest
import torch
import transformers

from fsdp_utils.lessons import tasks

TASKS = {"vit": tasks.digits_vit, "t5": tasks.dates_t5, "llama": tasks.dates_llama}


@pytest.fixture(autouse=True)
def _one_thread():
    """Tensors this small only lose by being cut among threads, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=TASKS)
def task(request) -> tasks.Task:
    return TASKS[request.param]()


def rows(data: dict[str, torch.Tensor], *names: str) -> set[tuple[float, ...]]:
    flat = torch.cat([data[name].flatten(1).float() for name in names], dim=1)
    return {tuple(row.tolist()) for row in flat}


def test_every_build_has_the_same_weights_and_leaves_the_seed_alone(task):
    before = torch.random.get_rng_state()
    one, other = task.build(), task.build()
    assert torch.equal(torch.random.get_rng_state(), before)
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_no_test_input_is_seen_in_training(task):
    name = "pixel_values" if "pixel_values" in task.train else "input_ids"
    assert not rows(task.train, name) & rows(task.test, name)


def test_no_date_of_the_test_is_answered_in_training_in_another_spelling():
    train, test = tasks.date_pairs()
    assert not {answer for _, answer in train} & {answer for _, answer in test}
    assert len({answer for _, answer in test}) == tasks.DATES_FOR_TEST
    assert len(test) == 3 * tasks.DATES_FOR_TEST


def test_date_pairs_say_the_same_date_twice():
    train, _ = tasks.date_pairs()
    for source, answer in train[:300]:
        year, month, day = answer.split("-")
        name = tasks.MONTHS[int(month) - 1]
        assert year in source
        assert name[:3] in source
        assert str(int(day)) in source
        assert len(source) <= tasks.LONGEST_SPELLING


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_shares_of_all_ranks_are_the_batch(task, world_size):
    shares = [task.batch(7, rank=rank, world_size=world_size) for rank in range(world_size)]
    whole = task.batch(7)
    for name, tensor in whole.items():
        assert torch.equal(torch.cat([share[name] for share in shares]), tensor)
        assert {len(share[name]) for share in shares} == {tasks.BATCH // world_size}


def test_shares_hold_equally_many_labels(task):
    # otherwise the mean of the ranks' losses is not the loss of the batch
    counts = {
        (task.batch(0, rank=rank, world_size=4)["labels"] != tasks.IGNORED).sum().item() for rank in range(4)
    }
    assert len(counts) == 1


def test_an_epoch_shows_every_sample_at_most_once_and_the_next_in_another_order(task):
    count = len(task.train["labels"])
    per_epoch = count // tasks.BATCH
    indexed = tasks.Task(task.build, {"row": torch.arange(count)}, {})
    first = torch.cat([indexed.batch(step)["row"] for step in range(per_epoch)])
    second = torch.cat([indexed.batch(step)["row"] for step in range(per_epoch, 2 * per_epoch)])
    assert len(first.unique()) == len(first) == per_epoch * tasks.BATCH
    assert not torch.equal(first, second)


def test_ranks_without_equal_shares_are_refused(task):
    with pytest.raises(ValueError, match="no equal shares for 5 ranks"):
        task.batch(0, world_size=5)


def test_accuracy_counts_the_answers_characters_alone():
    task = tasks.dates_llama()

    class Oracle(torch.nn.Module):
        """Knows every answer, and nothing of the questions."""

        def forward(self, input_ids, labels):
            right = labels.roll(-1, dims=1).clamp(min=0)
            return transformers.utils.ModelOutput(logits=torch.nn.functional.one_hot(right, tasks.VOCABULARY))

    class Wrong(Oracle):
        def forward(self, input_ids, labels):
            return super().forward(input_ids, (labels + 1) % tasks.VOCABULARY)

    assert task.accuracy(Oracle()) == 1
    assert task.accuracy(Wrong()) == 0


@pytest.mark.parametrize(("name", "steps", "least"), [("vit", 60, 0.5), ("t5", 40, 0.5), ("llama", 40, 0.35)])
def test_a_few_steps_teach_something_that_holds_for_the_test(name, steps, least):
    task = TASKS[name]()
    model = task.build()
    before = task.accuracy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        optimizer.zero_grad()
        model(**task.batch(step)).loss.backward()
        optimizer.step()
    assert before < 0.2
    assert task.accuracy(model) > least


def test_a_pretrained_vit_gets_images_of_its_own_size(tmp_path):
    config = transformers.ViTConfig(
        image_size=16,
        patch_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    saved = transformers.ViTForImageClassification(config)
    saved.save_pretrained(tmp_path)
    task = tasks.digits_vit(pretrained=str(tmp_path))
    model = task.build()
    assert task.train["pixel_values"].shape[1:] == (3, 16, 16)
    assert torch.equal(model.vit.embeddings.cls_token, saved.vit.embeddings.cls_token)
    assert model(**task.batch(0)).logits.shape == (tasks.BATCH, 10)


def save_tokenizer(folder) -> int:
    """A tokenizer of the words in the dates, as a checkpoint would bring one; returns its size."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "</s>", "<unk>", *tasks.CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return len(words)


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_a_pretrained_text_model_brings_its_weights_and_its_tokenizer(tmp_path, name):
    size = save_tokenizer(tmp_path)
    small = TASKS[name]().build().config
    small.vocab_size, small.num_layers, small.num_hidden_layers = size, 1, 1
    kind = {"t5": transformers.T5ForConditionalGeneration, "llama": transformers.LlamaForCausalLM}[name]
    saved = kind(small)
    saved.save_pretrained(tmp_path)
    task = TASKS[name](pretrained=str(tmp_path))
    model = task.build()
    for ours, theirs in zip(model.parameters(), saved.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert task.train["input_ids"].max() < size
    assert torch.isfinite(model(**task.batch(0)).loss)
