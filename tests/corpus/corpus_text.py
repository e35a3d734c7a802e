"""Recipes: encoders, decoders and translators of transformers, in tiny configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from corpus_recipe import Named, Torch

#: Sizes that most configurations have.
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WORDS = {"input_ids": {0: "batch", 1: "tokens"}, "attention_mask": {0: "batch", 1: "tokens"}}


def ids(*shape: int) -> torch.Tensor:
    """Return random identifiers of words."""
    return torch.randint(3, 100, shape)


def encoder(config: type, model: type, output: str = "last_hidden_state", mask: bool = True, **more: Any) -> Torch:
    """Return a model of words and a mask, both open."""
    inputs = {"input_ids": ids(2, 7), "attention_mask": torch.ones(2, 7, dtype=torch.int64)}
    inputs = inputs if mask else {"input_ids": inputs["input_ids"]}
    module = Named(model(config(**{**SMALL, **more})), (output,), tuple(inputs))
    return Torch(
        module,
        inputs,
        ("y",),
        {n: WORDS[n] for n in inputs},
        ({"batch": 1, "tokens": 5}, {"batch": 3, "tokens": 12}),
        {"input_ids": "below 100", "attention_mask": "mask"},
    )


def decoder(config: type, model: type, heads: int = 2, width: int = 4, **more: Any) -> Torch:
    """Return a causal model with a cache. It accepts keys and values of the words before, and returns the extended ones."""
    settings = {**SMALL, "num_key_value_heads": heads, **more}
    module = model(config(**settings))
    layers = settings["num_hidden_layers"]
    inputs = {"input_ids": ids(2, 3), "attention_mask": torch.ones(2, 8, dtype=torch.int64)}
    given, outputs, past = tuple(inputs), ["logits"], {0: "batch", 2: "past"}
    axes: dict[str, dict[int, str]] = {"input_ids": {0: "batch", 1: "tokens"}, "attention_mask": {0: "batch", 1: "total"}}
    for n in range(layers):
        for part in ("key", "value"):
            inputs[f"past_{part}_{n}"] = torch.randn(2, heads, 5, width)
            axes[f"past_{part}_{n}"] = past
            outputs.append(f"{part}_{n}")
    further = ({"batch": 1, "tokens": 1, "past": 9, "total": 10}, {"batch": 3, "tokens": 6, "past": 2, "total": 8})
    values = {"input_ids": "below 100", "attention_mask": "ones"}
    return Torch(Named(module, ("logits",), given, layers), inputs, tuple(outputs), axes, further, values)


def causal(config: type, model: type, **more: Any) -> Torch:
    """Return a causal model over all words at once."""
    return encoder(config, model, "logits", mask=False, use_cache=False, **more)


def translator(config: type, model: type, output: str = "logits", **more: Any) -> Torch:
    """Return an encoder and a decoder over words."""
    inputs = {"input_ids": ids(2, 6), "attention_mask": torch.ones(2, 6, dtype=torch.int64), "decoder_input_ids": ids(2, 4)}
    module = Named(model(config(**{**SMALL, "decoder_start_token_id": 0, **more})), (output,), tuple(inputs), use_cache=False)
    axes = {**WORDS, "decoder_input_ids": {0: "batch", 1: "said"}}
    further = ({"batch": 1, "tokens": 9, "said": 3}, {"batch": 3, "tokens": 4, "said": 7})
    return Torch(module, inputs, ("y",), axes, further, {"attention_mask": "mask"})


#: Sizes by the names of encoder-decoder configurations.
PAIR: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
T = transformers
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
QWEN_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "experts_implementation": "eager",
}
#: Gemma's configuration has separate values of the softcap and the window.
GEMMA = {"head_dim": 4, "sliding_window": 8}
DEBERTA: dict[str, Any] = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
}

RECIPES: dict[str, Callable[[], Torch]] = {
    "roberta": lambda: encoder(T.RobertaConfig, T.RobertaModel, max_position_embeddings=66),
    "distilbert": lambda: encoder(T.DistilBertConfig, T.DistilBertModel, dim=16, hidden_dim=32, n_layers=2, n_heads=4),
    "albert": lambda: encoder(T.AlbertConfig, T.AlbertModel, embedding_size=8),
    "electra": lambda: encoder(T.ElectraConfig, T.ElectraModel, embedding_size=8),
    "deberta": lambda: encoder(T.DebertaV2Config, T.DebertaV2Model, **DEBERTA),
    "mpnet": lambda: encoder(T.MPNetConfig, T.MPNetModel),
    "modernbert": lambda: encoder(T.ModernBertConfig, T.ModernBertModel, local_attention=8, cls_token_id=1, sep_token_id=2),
    "fnet": lambda: encoder(T.FNetConfig, T.FNetModel, mask=False),
    "bert_classifier": lambda: encoder(T.BertConfig, T.BertForSequenceClassification, "logits"),
    "gpt2": lambda: decoder(T.GPT2Config, T.GPT2LMHeadModel, heads=4, n_embd=16, n_layer=2, n_head=4, n_positions=64),
    "llama": lambda: decoder(T.LlamaConfig, T.LlamaForCausalLM),
    "mistral": lambda: decoder(T.MistralConfig, T.MistralForCausalLM, sliding_window=6),
    "qwen2": lambda: decoder(T.Qwen2Config, T.Qwen2ForCausalLM),
    "qwen3": lambda: decoder(T.Qwen3Config, T.Qwen3ForCausalLM, head_dim=4),
    "phi3": lambda: decoder(T.Phi3Config, T.Phi3ForCausalLM),
    "gemma2": lambda: decoder(T.Gemma2Config, T.Gemma2ForCausalLM, **GEMMA),
    "gemma3": lambda: decoder(T.Gemma3TextConfig, T.Gemma3ForCausalLM, **GEMMA),
    "gpt_neox": lambda: causal(T.GPTNeoXConfig, T.GPTNeoXForCausalLM),
    "opt": lambda: encoder(T.OPTConfig, T.OPTForCausalLM, "logits", use_cache=False, ffn_dim=32, word_embed_proj_dim=16),
    "bloom": lambda: encoder(T.BloomConfig, T.BloomForCausalLM, "logits", use_cache=False, n_layer=2, n_head=4),
    "falcon": lambda: causal(T.FalconConfig, T.FalconForCausalLM),
    "olmo2": lambda: causal(T.Olmo2Config, T.Olmo2ForCausalLM),
    "mixtral": lambda: causal(T.MixtralConfig, T.MixtralForCausalLM, num_key_value_heads=2, **MOE),
    "qwen2_moe": lambda: causal(T.Qwen2MoeConfig, T.Qwen2MoeForCausalLM, num_key_value_heads=2, **QWEN_MOE),
    "mamba": lambda: causal(T.MambaConfig, T.MambaForCausalLM, state_size=4, expand=2, conv_kernel=4),
    "mamba2": lambda: causal(
        T.Mamba2Config, T.Mamba2ForCausalLM, state_size=4, num_heads=4, head_dim=8, n_groups=1, chunk_size=4, expand=2
    ),
    "rwkv": lambda: causal(T.RwkvConfig, T.RwkvForCausalLM, attention_hidden_size=16, context_length=32),
    "t5": lambda: translator(T.T5Config, T.T5ForConditionalGeneration, **T5),
    "t5_encoder": lambda: encoder(T.T5Config, T.T5EncoderModel, **T5),
    "bart": lambda: translator(T.BartConfig, T.BartForConditionalGeneration, **PAIR),
    "marian": lambda: translator(T.MarianConfig, T.MarianMTModel, **PAIR),
}
