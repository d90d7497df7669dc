"""Configurations of tiny models, one function per architecture, every layer kind present.

All are hidden size 64 with windows, chunks and groups of 16, two to six layers. A configuration is
what `config.json` holds; `tiny.build_tiny` adds the token ids and writes the weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

from . import tiny_recurrent as recurrent
from .tiny_base import HIDDEN, WINDOW, Config, base_config


def llama(vocab: int, head_dim: int) -> Config:
    return base_config(vocab, head_dim)


def qwen2(vocab: int, head_dim: int) -> Config:
    config = base_config(vocab, head_dim, tie_word_embeddings=True)
    del config["head_dim"]
    return config


def qwen3(vocab: int, head_dim: int) -> Config:
    return base_config(vocab, head_dim, tie_word_embeddings=True)


def deepseek_v2(vocab: int, head_dim: int) -> Config:
    yarn = {
        "type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
    return _latent_attention(vocab, head_dim) | {"rope_scaling": yarn, "topk_method": "greedy"}


def deepseek_v3(vocab: int, head_dim: int) -> Config:
    return _latent_attention(vocab, head_dim) | {"scoring_func": "sigmoid", "norm_topk_prob": True}


def _latent_attention(vocab: int, head_dim: int) -> Config:
    return base_config(
        vocab,
        head_dim,
        num_hidden_layers=3,
        num_key_value_heads=HIDDEN // head_dim,
        moe_intermediate_size=32,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=head_dim,
        qk_nope_head_dim=head_dim,
        v_head_dim=head_dim,
        routed_scaling_factor=1.0,
    )


def gemma2(vocab: int, head_dim: int) -> Config:
    return base_config(vocab, head_dim, query_pre_attn_scalar=head_dim, tie_word_embeddings=True)


def gemma3_text(vocab: int, head_dim: int) -> Config:
    return base_config(
        vocab,
        head_dim,
        num_hidden_layers=4,
        query_pre_attn_scalar=head_dim,
        sliding_window=WINDOW,
        sliding_window_pattern=2,
        rope_local_base_freq=1000.0,
        tie_word_embeddings=True,
    )


def cohere2(vocab: int, head_dim: int) -> Config:
    return base_config(
        vocab,
        head_dim,
        num_hidden_layers=4,
        sliding_window=WINDOW,
        sliding_window_pattern=2,
        logit_scale=0.5,
        layer_norm_eps=1e-5,
        tie_word_embeddings=True,
    )


def gpt_oss(vocab: int, head_dim: int) -> Config:
    return base_config(
        vocab,
        head_dim,
        num_hidden_layers=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )


def llama4(vocab: int, head_dim: int) -> Config:
    text = base_config(
        vocab,
        head_dim,
        model_type="llama4_text",
        num_hidden_layers=4,
        attention_bias=False,
        attention_chunk_size=WINDOW,
        interleave_moe_layer_step=2,
        intermediate_size_mlp=128,
        num_experts_per_tok=1,
        num_local_experts=4,
        rope_scaling=None,
        use_qk_norm=True,
    )
    return {"text_config": text}


def gemma3n(vocab: int, head_dim: int) -> Config:
    """Six layers: the last two read the keys and values of layers 2 and 3 (shared KV)."""
    text = base_config(
        vocab,
        head_dim,
        model_type="gemma3n_text",
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=vocab,
        sliding_window=WINDOW,
        rope_local_base_freq=1000.0,
        final_logit_softcapping=30.0,
        layer_types=["sliding_attention", "full_attention"] * 3,
        activation_sparsity_pattern=[0.95] * 2 + [0.0] * 4,
        hidden_size_per_layer_input=16,
        altup_num_inputs=2,
        altup_coef_clip=120.0,
        altup_correct_scale=True,
        altup_active_idx=0,
        laurel_rank=8,
    )
    return {"text_config": text}


def phi3(vocab: int, head_dim: int) -> Config:
    return base_config(vocab, head_dim, partial_rotary_factor=1.0)


CONFIGS: dict[str, Callable[[int, int], Config]] = {
    build.__name__: build
    for build in (
        llama,
        qwen2,
        qwen3,
        deepseek_v2,
        deepseek_v3,
        gemma2,
        gemma3_text,
        cohere2,
        gpt_oss,
        recurrent.qwen3_next,
        recurrent.qwen3_5,
        recurrent.lfm2,
        recurrent.mamba,
        recurrent.mamba2,
        recurrent.falcon_h1,
        recurrent.jamba,
        llama4,
        gemma3n,
        phi3,
        recurrent.rwkv7,
    )
}
