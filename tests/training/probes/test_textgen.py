"""TextgenCallback: when it generates, the state it restores, and the sampling loop for plain models."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from skyward.errors import UsageError
from skyward.training import TrainerCallback
from skyward.training.callbacks.sampling import Sampling
from skyward.training.callbacks.textgen import TextgenCallback
from tests.training.probes.small_run import SmallNet, SmallRun
from tests.training.probes.tiny_lm import ALPHABET, Characters, TinyLM


class Texts:
    """A summary writer that keeps its texts."""

    def __init__(self) -> None:
        self.texts: list[tuple[str, str, int]] = []
        self.flushes = 0

    def add_text(self, tag: str, text: str, global_step: int) -> None:
        self.texts.append((tag, text, global_step))

    def flush(self) -> None:
        self.flushes += 1


def evaluate(callback: TextgenCallback, model: nn.Module, step: int = 0, **more: Any) -> list[str]:
    run = SmallRun(Path("unused"), [callback], model=model, processing_class=Characters(), **more)
    run.state.global_step = step
    run.fire("on_evaluate", metrics={})
    return callback.texts


def test_text_goes_to_tensorboard(tmp_path: Path) -> None:
    writer = Texts()
    texts = evaluate(TextgenCallback(writer, ["to be", "or not"], max_new_tokens=8), TinyLM(), step=7)
    assert writer.texts == [("eval-text", "\n\n---\n\n".join(texts), 7)]
    assert writer.flushes == 1
    assert [each.split(" [START] ")[0] for each in texts] == ["to be", "or not"]
    assert all(1 <= len(each.split(" [START] ")[1]) <= 8 for each in texts)


def test_without_a_writer_text_goes_to_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = evaluate(TextgenCallback(prompts=["ab"], max_new_tokens=3), TinyLM(), step=4)
    assert capsys.readouterr().out == f"step 4, generated:\n{text}\n"


def test_real_tensorboard_reads_it_back(tmp_path: Path) -> None:
    event_file = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    (text,) = evaluate(TextgenCallback(writer, ["ab"], max_new_tokens=3), TinyLM(), step=4)
    writer.close()
    events = event_file.EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Tensors("eval-text/text_summary")
    assert event.step == 4
    assert event.tensor_proto.string_val[0].decode() == text


def steps_with_text(folder: Path, callback: TextgenCallback, **args: Any) -> list[int]:
    writer = Texts()
    callback.summary_writer = writer
    SmallRun(folder, [callback], model=TrainableLM(), processing_class=Characters(), **args).train()
    return [step for _, _, step in writer.texts]


class TrainableLM(SmallNet):
    """Model that trains on images and is a language model for tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = TinyLM()

    def forward(self, images: torch.Tensor) -> Any:
        return self.lm(images) if images.dtype == torch.long else super().forward(images)


def test_it_generates_at_the_first_evaluation_and_then_at_multiples_of_its_steps(tmp_path: Path) -> None:
    every = TextgenCallback(prompts=["a"], max_new_tokens=1)
    assert steps_with_text(tmp_path / "1", every, max_steps=12, eval_steps=2) == [2, 4, 6, 8, 10, 12]
    some = TextgenCallback(prompts=["a"], max_new_tokens=1, generation_steps=4)
    assert steps_with_text(tmp_path / "2", some, max_steps=12, eval_steps=2) == [2, 4, 8, 12]
    # A late evaluation moves nothing: the next multiple is the next.
    odd = TextgenCallback(prompts=["a"], max_new_tokens=1, generation_steps=4)
    assert steps_with_text(tmp_path / "3", odd, max_steps=12, eval_steps=3) == [3, 6, 9, 12]


def test_a_resumed_run_generates_when_the_whole_one_would(tmp_path: Path) -> None:
    """The counter is part of the checkpoint. Without it every evaluation would be due until it caught up."""
    whole = TextgenCallback(prompts=["a"], max_new_tokens=4, generation_steps=6)
    assert steps_with_text(tmp_path / "whole", whole, max_steps=14, eval_steps=2) == [2, 6, 12]

    writer = Texts()
    first = SmallRun(
        tmp_path / "cut",
        [TextgenCallback(writer, ["a"], generation_steps=6, max_new_tokens=4)],
        model=TrainableLM(),
        processing_class=Characters(),
        max_steps=8,
    ).train()
    second = SmallRun(
        tmp_path / "cut",
        [resumed := TextgenCallback(writer, ["a"], generation_steps=6, max_new_tokens=4)],
        model=TrainableLM(),
        processing_class=Characters(),
        max_steps=14,
    )
    second.resume(first.checkpoint()).train()
    assert [step for _, _, step in writer.texts] == [2, 6, 12]
    assert resumed.texts == whole.texts


def test_training_draws_the_same_numbers_with_and_without_it(tmp_path: Path) -> None:
    def losses(*callbacks: TrainerCallback) -> tuple[list[float], list[float]]:
        torch.manual_seed(0)
        random.seed(1)
        np.random.seed(1)  # the old generator is the one that is shared
        run = SmallRun(tmp_path, callbacks, model=TrainableLM(), processing_class=Characters(), logging_dir=None)
        run.train()
        return run.losses, [random.random(), float(np.random.rand()), float(torch.rand(()))]

    assert losses(TextgenCallback(prompts=["abc"], max_new_tokens=5)) == losses()


def test_every_modules_mode_and_compiled_call_are_restored_also_after_an_exception(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Model(TinyLM):
        fails = False

        def forward(self, tokens: torch.Tensor) -> Any:
            assert not self.training
            assert not self.drop.training
            assert not torch.is_grad_enabled()
            if self.fails:
                raise RuntimeError("no kernel")
            return super().forward(tokens)

    def refuses(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("generation calls the eager model")

    model = Model()
    model.train()
    model.embed.eval()  # frozen: it stays in this mode in a model that trains
    model._compiled_call_impl = refuses
    for fails in (False, True):
        model.fails = fails
        callback = TextgenCallback(prompts=["ab"], max_new_tokens=2)
        assert len(evaluate(callback, model)) == (0 if fails else 1)
        assert (model.training, model.embed.training, model.drop.training) == (True, False, True)
        assert model._compiled_call_impl is refuses
        assert torch.is_grad_enabled()
    assert caplog.messages == ["TextgenCallback.on_evaluate failed; the callback is disabled from now on"]


@pytest.mark.parametrize("returns", ["tensor", "pair", "mapping", "object"])
def test_logits_are_found_in_a_models_result(returns: str) -> None:
    texts = evaluate(TextgenCallback(prompts=["ab"], max_new_tokens=5), TinyLM(returns))
    assert texts == evaluate(TextgenCallback(prompts=["ab"], max_new_tokens=5), TinyLM())


def test_a_model_without_logits_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    evaluate(TextgenCallback(prompts=["ab"]), TinyLM("nonsense"))
    assert "no logits of the shape (batch, time, vocabulary)" in caplog.text


def test_a_text_longer_than_the_context_continues_from_its_end() -> None:
    model = TinyLM(block_size=6)
    callback = TextgenCallback(prompts=["abcd"], max_new_tokens=10, generation_config={"top_k": 5})
    evaluate(callback, model)
    assert max(model.seen) == 6
    assert len(model.seen) > 3


def test_an_empty_prompt_begins_with_the_token_that_ends_texts(caplog: pytest.LogCaptureFixture) -> None:
    assert evaluate(TextgenCallback(prompts=[""], max_new_tokens=3), TinyLM())[0].startswith(" [START] ")

    class WithoutEnd(Characters):
        eos_token_id = None  # type: ignore[assignment]

    callback = TextgenCallback(prompts=[""], max_new_tokens=3)
    SmallRun(Path("unused"), [callback], model=TinyLM(), processing_class=WithoutEnd()).fire("on_evaluate")
    assert "prompts: '' has no tokens" in caplog.text


def test_a_run_without_a_tokenizer_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    SmallRun(Path("unused"), [TextgenCallback(prompts=["a"])], model=TinyLM()).fire("on_evaluate")
    assert (
        "the run's processing_class is None, without encode() and decode(); pass the trainer a tokenizer" in caplog.text
    )


def test_huggingface_models_generate_by_their_own_method(caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, n_positions=32, vocab_size=len(ALPHABET), bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).train()
    calls: list[dict[str, Any]] = []
    generate = model.generate

    def watched(**kwargs: Any) -> Any:
        calls.append(kwargs)
        return generate(**kwargs)

    model.generate = watched
    state = torch.Generator().manual_seed(0).get_state()  # the run's, when it evaluates
    texts = evaluate(TextgenCallback(prompts=["ab"], max_new_tokens=6), model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert 0 < len(texts[0].removeprefix("ab [START] ")) <= 6
    chosen = {name: calls[0][name] for name in ("do_sample", "top_k", "temperature", "repetition_penalty")}
    assert chosen == {"do_sample": True, "top_k": 20, "temperature": 0.7, "repetition_penalty": 1.15}
    assert calls[0]["max_new_tokens"] == 6
    assert evaluate(TextgenCallback(prompts=["ab"], max_new_tokens=6), model) == texts

    greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=0, pad_token_id=0)
    with_object = evaluate(TextgenCallback(prompts=["ab"], max_new_tokens=4, generation_config=greedy), model)
    with_options = evaluate(
        TextgenCallback(prompts=["ab"], max_new_tokens=4, generation_config={"do_sample": False}), model
    )
    assert with_object == with_options
    assert caplog.messages == []


def test_the_sampling_loop_chooses_like_huggingfaces_processors() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    logits, seen = torch.randn(40) * 4, [3, 3, 17, 25]
    ids = torch.tensor([seen])
    scores = transformers.RepetitionPenaltyLogitsProcessor(1.3)(ids, logits[None])
    scores = transformers.TemperatureLogitsWarper(0.7)(ids, scores)
    scores = transformers.TopKLogitsWarper(10)(ids, scores)
    scores = transformers.TopPLogitsWarper(0.8)(ids, scores)
    expected = scores.softmax(-1)[0]
    sampling = Sampling(temperature=0.7, top_k=10, top_p=0.8, repetition_penalty=1.3)
    generator = torch.Generator().manual_seed(0)
    draws = 4000
    counts = torch.bincount(
        torch.tensor([sampling.choose(logits, seen, generator) for _ in range(draws)]), minlength=40
    )
    assert set(counts.nonzero().flatten().tolist()) == set(expected.nonzero().flatten().tolist())
    assert float((counts / draws - expected).abs().max()) < 0.03
    assert Sampling(do_sample=False, repetition_penalty=1).choose(logits, seen, generator) == int(logits.argmax())


def test_prompts_come_from_a_list_or_a_yaml_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.yaml"
    file.write_text("- Once upon a time\n- |\n  two\n  lines\n")
    assert TextgenCallback(prompts=file).prompts == ["Once upon a time", "two\nlines\n"]
    assert TextgenCallback(prompts=str(file)).prompts == ["Once upon a time", "two\nlines\n"]
    file.write_text("a: mapping\n")
    for wrong in (None, [], [1], str(file), str(tmp_path / "none.yaml")):
        with pytest.raises(UsageError, match="^TextgenCallback.prompts="):
            TextgenCallback(prompts=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: must be at least 1; set"),
        ({"generation_steps": 0}, "generation_steps=0: must be at least 1; set 1 or more, or None for eval_steps"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TextgenCallback(prompts=["a"], **options)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_p": 0}, {"top_k": -1}, {"repetition_penalty": 0}])
def test_sampling_out_of_range_is_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(UsageError, match=f"generation_config.{name}="):
        Sampling(**options)
    with pytest.raises(UsageError, match="num_beams needs a model with Hugging Face's generate"):
        Sampling.of({"num_beams": 4})


def test_defaults_are_those_of_the_table() -> None:
    import inspect

    parameters = inspect.signature(TextgenCallback).parameters
    assert {name: each.default for name, each in parameters.items()} == {
        "summary_writer": None,
        "prompts": None,
        "generation_config": None,
        "generation_steps": None,
        "max_new_tokens": 200,
    }
    assert TextgenCallback(prompts=["a"]).generation_config == {
        "do_sample": True,
        "top_k": 20,
        "temperature": 0.7,
        "repetition_penalty": 1.15,
    }
