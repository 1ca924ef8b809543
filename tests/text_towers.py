"""Small CLIP and SigLIP models with random weights and tokenizers of their own, in the folders of their makers."""

import io
import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from vitrail.weights.text_vectors import canonicalize_text

SENTENCES = [
    "a photo of a cat.", "a drawing of a dog.", "a photo of the small golden retriever.", "an egyptian mau, a pet.",
    "a blurry picture of flowers: rose, tulip and sunflower.", "art of a cat and a dog!",
]  # fmt: skip
LABELS = ("Egyptian mau", "golden retriever", "tulip", "dog")
TEMPLATES = ("a photo of a {}.", "art of the {}!", "{}, a pet.")
IMAGE = {"image_size": 32, "patch_size": 8}
TOWER = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def write_clip(folder: Path, family: str = "CLIP") -> Any:
    """A CLIPModel of transformers with a byte-level BPE tokenizer."""
    tokenizer = build_clip_tokenizer()
    text = TEXT | {"vocab_size": len(tokenizer), "max_position_embeddings": 20}
    text |= {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=TOWER | IMAGE, projection_dim=24)
    return write_folder(folder, f"{family}Model", config, tokenizer, build_image_processor("clip"))


def write_siglip(folder: Path, family: str = "Siglip") -> Any:
    """A SiglipModel of transformers with a word tokenizer, which lower-cases and drops punctuation as SigLIP's does."""
    tokenizer = build_siglip_tokenizer()
    text: dict[str, Any] = TEXT | {"vocab_size": len(tokenizer), "max_position_embeddings": 64, "projection_size": 48}
    text |= {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1}
    image = IMAGE if family == "Siglip" else {"patch_size": 8, "num_patches": 16}
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=TOWER | image)
    return write_folder(folder, f"{family}Model", config, tokenizer, build_image_processor("siglip"))


def write_folder(folder: Path, name: str, config: Any, tokenizer: Any, image_processor: Any) -> Any:
    model = randomize(getattr(transformers, name)(config))
    for part in (tokenizer, image_processor, model):
        part.save_pretrained(folder)
    return model


def write_metaclip2(folder: Path) -> Any:
    """The same as `write_clip` of transformers' MetaCLIP 2."""
    return write_clip(folder, "MetaClip2")


def write_siglip2(folder: Path) -> Any:
    """The same as `write_siglip` of transformers' SigLIP 2 of any shape (NaFlex)."""
    return write_siglip(folder, "Siglip2")


def write_open_clip(folder: Path, siglip: bool = False) -> Any:
    """A CLIP of open_clip in a folder as it has on the Hub, with its own tokenizer."""
    import open_clip

    vision = {"image_size": 32, "patch_size": 8, "width": 48, "layers": 2, "head_width": 12, "mlp_ratio": 2}
    text = {"context_length": 16, "vocab_size": 49408, "width": 32, "layers": 2, "heads": 4, "mlp_ratio": 2}
    config: dict[str, Any] = {"embed_dim": 24, "vision_cfg": vision, "text_cfg": text}
    if siglip:
        config |= {"init_logit_bias": -1.5, "custom_text": True}
    model_class = open_clip.CustomTextCLIP if siglip else open_clip.CLIP
    model = randomize(model_class(**{name: value for name, value in config.items() if name != "custom_text"}))
    preprocess = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "resize_mode": "shortest"}
    folder.mkdir(exist_ok=True)
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": preprocess}))
    safetensors.torch.save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    return model


def write_sentencepiece_siglip(folder: Path) -> Any:
    """The same as `write_siglip` with the tokenizer that SigLIP has: a SentencePiece model."""
    import sentencepiece

    model = write_siglip(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    content = io.BytesIO()
    canonical = [canonicalize_text(sentence) for sentence in SENTENCES]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(canonical * 10), model_writer=content, vocab_size=model.config.text_config.vocab_size,
        pad_id=-1, eos_id=1, bos_id=-1, unk_id=0, model_type="char", hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (folder / "spiece.model").write_bytes(content.getvalue())
    tokenizer = transformers.SiglipTokenizer(str(folder / "spiece.model"), model_input_names=["input_ids"])
    tokenizer.save_pretrained(folder)
    return model


def randomize(model: Any) -> Any:
    """Random numbers in every parameter, larger than their initialization, so that each one counts."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = name.endswith("weight") and ("norm" in name or "layrnorm" in name or "ln_" in name)
            spread = 0.2 if "position" in name or not name.startswith("text_model") else 0.5
            parameter.normal_(float(is_norm), spread, generator=generator)
        model.logit_scale.fill_(2.5)
        if getattr(model, "logit_bias", None) is not None:
            model.logit_bias.fill_(-1.5)
    return model.eval()


def build_clip_tokenizer() -> Any:
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|startoftext|>", "<|endoftext|>"],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator([sentence.replace(" ", "") for sentence in SENTENCES] + SENTENCES, trainer)
    content = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in content["merges"]]
    vocab = dict(content["vocab"])
    for letter in pre_tokenizers.ByteLevel.alphabet():
        vocab.setdefault(f"{letter}</w>", len(vocab))
    return transformers.CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=20)


def build_siglip_tokenizer() -> Any:
    words = sorted({word.strip(".,:!") for sentence in SENTENCES for word in sentence.split()})
    vocab = {"<unk>": 0, "</s>": 1} | {word: index + 2 for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), *(normalizers.Replace(mark, "") for mark in ".,:!")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="</s>",
        pad_token="</s>",
        model_max_length=64,
        model_input_names=["input_ids"],
    )


def build_image_processor(kind: str) -> Any:
    """The processor that resizes with Pillow, as vitrail does."""
    if kind == "clip":
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        return CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    return SiglipImageProcessorPil(size={"height": 32, "width": 32})
