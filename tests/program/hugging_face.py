"""Models of the package transformers, exported and computed as those of zoo.py are.

    hugging_face.py write DIR [--only NAME …]

exporting.py says what is written. It ends with status 1 where a model is refused that should not be, or the other way
round.

Each model is small, has random weights, and is exported in training mode with the defaults of its configuration, as
its users would: by keyword, input_ids and attention_mask for those that read text, with use_cache=False. What differs
says so in its entry. Needs the environment that `scripts/setup hf` makes in build/hugging_face/venv.
"""

import copy
import logging
import os
import sys

import exporting
import torch
import transformers
from torch.export import Dim
from zoo_entries import BATCH

transformers.logging.set_verbosity_error()
logging.getLogger("torch.fx.experimental.symbolic_shapes").setLevel(logging.ERROR)
# Some machines name AMX among what they can, and forbid it. oneDNN asks when it is first used.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# MKL computes as it does in our processes, which ask for the same by themselves.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

VOCABULARY = 97

# The configurations name their sizes in few ways.
ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
# Two heads of keys and values serve four of queries.
DECODER = {**ENCODER, "num_key_value_heads": 2, "use_cache": False}
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "use_cache": False}
ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "use_cache": False,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 5,
}
# Ids of special tokens whose defaults lie beyond the small vocabulary.
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


MODELS: dict[str, exporting.Entry] = {}


def entry(name, kind, configuration, inputs, cuts, layers_kept=(), implementation=None, dtype=None, **options):
    """A model of class `kind`; `layers_kept` are as in keeping_layers(), `implementation` has what is not the default
    one of attention or of experts."""
    assert name not in MODELS

    def model():
        made = keeping_layers(kind, layers_kept) if layers_kept else kind
        # A copy, since the choice of an implementation is kept in it.
        made = made._from_config(copy.deepcopy(configuration), **(implementation or {}))
        # Biases that are zero and norms that are one would hide what is missing, and small weights the gradients.
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        return made.to(dtype) if dtype else made

    MODELS[name] = exporting.Entry(model, inputs, cuts, **options)


def keeping_layers(kind, stacks):
    """The class without LayerDrop: for each layer of a stack it tosses a coin in training, even at a probability of 0,
    and torch.export cannot follow an `if` on the result. A stack is told that it is not in training; its layers are not
    told so. The stack's own dropout of embeddings goes with it."""

    class Kept(kind):
        def train(self, mode=True):
            super().train(mode)
            for stack in stacks:
                self.get_submodule(stack).training = False
            return self

    return Kept


def text(rows=3, length=7):
    """Sentences of several lengths, padded on the right."""
    lengths = torch.randint(3, length + 1, (rows, 1))
    present = torch.arange(length) < lengths
    ids = torch.randint(3, VOCABULARY, (rows, length)).where(present, 0)
    return (), {"input_ids": ids, "attention_mask": present.long()}


def labelled_text():
    _, kwargs = text()
    return (), {**kwargs, "labels": kwargs["input_ids"].where(kwargs["attention_mask"] == 1, -100)}


def plain_text():
    _, kwargs = text()
    return (), {"input_ids": kwargs["input_ids"]}


def text_and_target():
    _, kwargs = text()
    return (), {**kwargs, "decoder_input_ids": torch.randint(3, VOCABULARY, (3, 5))}


def pixels(rows=2, size=16):
    return (), {"pixel_values": torch.randn(rows, 3, size, size)}


def large_pixels():
    return pixels(size=32)


def pixels_and_text():
    ids = torch.cat([torch.randint(3, VOCABULARY - 1, (3, 6)), torch.full((3, 1), VOCABULARY - 1)], dim=1)
    return (), {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels(rows=3)[1]}


def mel_and_target():
    return (), {"input_features": torch.randn(2, 8, 16), "decoder_input_ids": torch.randint(3, VOCABULARY, (2, 5))}


def waves():
    return (), {"input_values": torch.randn(2, 400)}


def stack_cuts(blocks, inner, head):
    """Of three blocks with a head behind them."""
    return [
        ([f"{blocks}.1"], "between blocks: the mask crosses the border"),
        ([f"{blocks}.1", f"{blocks}.2"], "one block a stage"),
        ([f"{blocks}.0", f"{blocks}.2", head], "the embedding and the head alone"),
        ([f"{blocks}.1.{inner}"], "inside a block: the residual crosses the border"),
        ([head], "a last stage that has nothing but the head"),
    ]


def encoder_decoder_cuts(encoder, decoder, cross, head):
    """Of two and two blocks."""
    return [
        ([f"{decoder}.0"], "the memory and its mask cross the border"),
        ([f"{encoder}.1", f"{decoder}.1"], "the memory is made in one stage and used in two"),
        ([f"{encoder}.0", f"{decoder}.0", head], "four stages; the embedding and the head alone"),
        ([f"{encoder}.1", f"{decoder}.0", f"{decoder}.1"], "four stages; each block of the decoder in its own"),
        ([f"{decoder}.1.{cross}"], "inside a block, before it uses the memory"),
    ]


GPT2_CUTS = stack_cuts("transformer.h", "mlp", "lm_head")
LLAMA_CUTS = stack_cuts("model.layers", "mlp", "lm_head")

# Decoders. The head of GPT-2, and of others by their default, is tied to the embedding.
entry(
    "gpt2",
    transformers.GPT2LMHeadModel,
    transformers.GPT2Config(**GPT, **SPECIAL),
    text,
    GPT2_CUTS,
    mode="eval",
)
entry(
    "gpt2_labels",  # With the loss in the model.
    transformers.GPT2LMHeadModel,
    transformers.GPT2Config(**GPT, **SPECIAL),
    labelled_text,
    GPT2_CUTS,
    mode="eval",
)
entry(
    "gpt2_hidden_states",  # Every block has an output of the model.
    transformers.GPT2LMHeadModel,
    transformers.GPT2Config(**GPT, **SPECIAL, output_hidden_states=True),
    text,
    GPT2_CUTS,
    mode="eval",
)
entry(
    "gpt2_eager",  # Attention in single operators.
    transformers.GPT2LMHeadModel,
    transformers.GPT2Config(**GPT, **SPECIAL),
    text,
    GPT2_CUTS,
    implementation={"attn_implementation": "eager"},
    mode="eval",
)
entry(
    "gpt2_cache",
    transformers.GPT2LMHeadModel,
    transformers.GPT2Config(**{**GPT, "use_cache": True}, **SPECIAL),
    text,
    [],
    refused=True,
)
entry("llama", transformers.LlamaForCausalLM, transformers.LlamaConfig(**DECODER, **SPECIAL), text, LLAMA_CUTS)
entry(
    "llama_tied",
    transformers.LlamaForCausalLM,
    transformers.LlamaConfig(**DECODER, **SPECIAL, tie_word_embeddings=True),
    text,
    LLAMA_CUTS,
)
entry(
    "llama_rope_dynamic",  # The base of its angles changes with the length, by an `if`.
    transformers.LlamaForCausalLM,
    transformers.LlamaConfig(
        **DECODER, **SPECIAL, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    ),
    text,
    [],
    refused=True,
)
LENGTH = Dim("length", min=3, max=32)
entry(
    "llama_dynamic",
    transformers.LlamaForCausalLM,
    transformers.LlamaConfig(**DECODER, **SPECIAL),
    text,
    LLAMA_CUTS,
    dynamic={name: {0: BATCH, 1: LENGTH} for name in ("input_ids", "attention_mask")},
    example={"rows": 2, "length": 5},
)
entry(
    "llama_bfloat16",
    transformers.LlamaForCausalLM,
    transformers.LlamaConfig(**DECODER, **SPECIAL),
    text,
    LLAMA_CUTS,
    dtype=torch.bfloat16,
    tolerance=2e-4,
)
entry(
    "mistral",  # Attention within a window.
    transformers.MistralForCausalLM,
    transformers.MistralConfig(**DECODER, **SPECIAL, sliding_window=4),
    text,
    LLAMA_CUTS,
)
# Four experts, two for each token. By default they are called through torch.ops.transformers.grouped_mm_fallback, an
# operator written in Python, which no other process has; not so in bfloat16.
MIXTRAL = transformers.MixtralConfig(**DECODER, **SPECIAL, num_local_experts=4, num_experts_per_tok=2)
entry(
    "mixtral",
    transformers.MixtralForCausalLM,
    MIXTRAL,
    text,
    LLAMA_CUTS,
    implementation={"experts_implementation": "batched_mm"},
)
entry(
    "mixtral_bfloat16",
    transformers.MixtralForCausalLM,
    MIXTRAL,
    text,
    LLAMA_CUTS,
    dtype=torch.bfloat16,
    tolerance=2e-4,
)
entry(
    "gpt_oss",  # Attention with sinks.
    transformers.GptOssForCausalLM,
    transformers.GptOssConfig(
        **DECODER, **SPECIAL, head_dim=8, sliding_window=4, num_local_experts=4, num_experts_per_tok=2
    ),
    text,
    LLAMA_CUTS,
    implementation={"experts_implementation": "batched_mm"},
)
entry(
    "deepseek_v3",  # Latent attention; the first layer has no experts, the others have groups of them.
    transformers.DeepseekV3ForCausalLM,
    transformers.DeepseekV3Config(
        **{**DECODER, "num_key_value_heads": 4},
        **SPECIAL,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        first_k_dense_replace=1,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
    ),
    text,
    LLAMA_CUTS,
    implementation={"experts_implementation": "batched_mm"},
)
entry("qwen2", transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**DECODER, **SPECIAL), text, LLAMA_CUTS)
entry(
    "qwen3",
    transformers.Qwen3ForCausalLM,
    transformers.Qwen3Config(**DECODER, **SPECIAL, head_dim=8),
    text,
    LLAMA_CUTS,
)
entry(
    "gemma",
    transformers.GemmaForCausalLM,
    transformers.GemmaConfig(**DECODER, **SPECIAL, head_dim=8),
    text,
    LLAMA_CUTS,
)
entry(
    "gemma2",
    transformers.Gemma2ForCausalLM,
    transformers.Gemma2Config(**DECODER, **SPECIAL, head_dim=8, sliding_window=4),
    text,
    LLAMA_CUTS,
)
entry(
    "gemma3",  # Two masks and two rotary embeddings, for layers with and without a window.
    transformers.Gemma3ForCausalLM,
    transformers.Gemma3TextConfig(
        **DECODER,
        **SPECIAL,
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    text,
    LLAMA_CUTS,
)
entry("phi", transformers.PhiForCausalLM, transformers.PhiConfig(**DECODER, **SPECIAL), text, LLAMA_CUTS)
entry("phi3", transformers.Phi3ForCausalLM, transformers.Phi3Config(**DECODER, **SPECIAL), text, LLAMA_CUTS)
entry("olmo2", transformers.Olmo2ForCausalLM, transformers.Olmo2Config(**DECODER, **SPECIAL), text, LLAMA_CUTS)
entry(
    "falcon",
    transformers.FalconForCausalLM,
    transformers.FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        use_cache=False,
        **SPECIAL,
    ),
    text,
    GPT2_CUTS,
)
entry(
    "gpt_neox",
    transformers.GPTNeoXForCausalLM,
    transformers.GPTNeoXConfig(**ENCODER, **SPECIAL, use_cache=False),
    text,
    stack_cuts("gpt_neox.layers", "mlp", "lm_head"),
)
entry(
    "gpt_j",
    transformers.GPTJForCausalLM,
    transformers.GPTJConfig(**GPT, **SPECIAL, rotary_dim=4),
    text,
    GPT2_CUTS,
)
entry(
    "bloom",
    transformers.BloomForCausalLM,
    transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=3, n_head=4, use_cache=False, **SPECIAL),
    text,
    GPT2_CUTS,
)
entry(
    "mamba",
    transformers.MambaForCausalLM,
    transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, state_size=4, use_cache=False, **SPECIAL
    ),
    plain_text,
    stack_cuts("backbone.layers", "mixer.out_proj", "lm_head"),
    tolerance=1e-6,
)
OPT = transformers.OPTConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    word_embed_proj_dim=32,
    ffn_dim=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=64,
    use_cache=False,
    **SPECIAL,
)
entry("opt_layerdrop", transformers.OPTForCausalLM, OPT, text, [], refused=True)
entry(
    "opt",
    transformers.OPTForCausalLM,
    OPT,
    text,
    stack_cuts("model.decoder.layers", "fc1", "lm_head"),
    layers_kept=["model.decoder"],
    mode="eval",
    faint=("k_proj.bias",),
)

# Encoders.
entry(
    "bert",
    transformers.BertForSequenceClassification,
    transformers.BertConfig(**ENCODER, num_labels=5),
    text,
    stack_cuts("bert.encoder.layer", "intermediate", "classifier"),
    mode="eval",
    faint=("key.bias",),
)
entry(
    "bert_masked",
    transformers.BertForMaskedLM,
    transformers.BertConfig(**ENCODER),
    text,
    stack_cuts("bert.encoder.layer", "intermediate", "cls"),
    mode="eval",
    faint=("key.bias",),
)
entry(
    "roberta",
    transformers.RobertaForMaskedLM,
    transformers.RobertaConfig(**ENCODER, pad_token_id=1),
    text,
    stack_cuts("roberta.encoder.layer", "intermediate", "lm_head"),
    mode="eval",
    faint=("key.bias",),
)
entry(
    "distilbert",
    transformers.DistilBertForSequenceClassification,
    transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=32, hidden_dim=48, n_layers=3, n_heads=4, max_position_embeddings=64
    ),
    text,
    stack_cuts("distilbert.transformer.layer", "ffn", "classifier"),
    mode="eval",
    faint=("k_lin.bias",),
)
entry(
    "electra",
    transformers.ElectraForTokenClassification,
    transformers.ElectraConfig(**ENCODER, embedding_size=24, num_labels=5),
    text,
    stack_cuts("electra.encoder.layer", "intermediate", "classifier"),
    mode="eval",
    faint=("key.bias",),
)
entry(
    "albert",  # One layer, called three times: no cut by name is inside the encoder.
    transformers.AlbertForSequenceClassification,
    transformers.AlbertConfig(**ENCODER, embedding_size=24, num_labels=5),
    text,
    [
        (["albert.encoder"], "the embedding alone"),
        (["albert.encoder", "albert.pooler"], "three stages"),
        (["albert.encoder", "albert.pooler", "classifier"], "four stages"),
    ],
    mode="eval",
    faint=("key.bias",),
)
entry(
    "deberta_v2",
    transformers.DebertaV2ForSequenceClassification,
    transformers.DebertaV2Config(**ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"], num_labels=5),
    text,
    stack_cuts("deberta.encoder.layer", "intermediate", "classifier"),
    mode="eval",
    faint=("pos_key_proj.bias",),
)
entry(
    "modernbert",
    transformers.ModernBertForMaskedLM,
    transformers.ModernBertConfig(**ENCODER, **SPECIAL, cls_token_id=1, sep_token_id=2, local_attention=4),
    text,
    stack_cuts("model.layers", "mlp", "decoder"),
)

entry(
    "fnet",  # Fourier transforms in the place of attention.
    transformers.FNetForSequenceClassification,
    transformers.FNetConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        max_position_embeddings=64,
        num_labels=5,
    ),
    plain_text,
    stack_cuts("fnet.encoder.layer", "intermediate", "classifier"),
    mode="eval",
)
entry(
    "longformer",
    transformers.LongformerForSequenceClassification,
    transformers.LongformerConfig(**ENCODER, attention_window=4),
    text,
    [],
    refused=True,
)

# Encoders with decoders.
entry(
    "t5",  # One embedding for both, and the position bias of each first layer goes to the others.
    transformers.T5ForConditionalGeneration,
    transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, use_cache=False
    ),
    text_and_target,
    encoder_decoder_cuts("encoder.block", "decoder.block", "layer.1", "lm_head"),
    mode="eval",
)
entry(
    "switch",
    transformers.SwitchTransformersForConditionalGeneration,
    transformers.SwitchTransformersConfig(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, num_experts=2, use_cache=False
    ),
    text_and_target,
    [],
    refused=True,
)
BART = transformers.BartConfig(**ENCODER_DECODER, max_position_embeddings=64, **SPECIAL)
entry(
    "bart_layerdrop",
    transformers.BartForConditionalGeneration,
    BART,
    text_and_target,
    [],
    refused=True,
)
entry(
    "bart",
    transformers.BartForConditionalGeneration,
    BART,
    text_and_target,
    encoder_decoder_cuts("model.encoder.layers", "model.decoder.layers", "encoder_attn", "lm_head"),
    layers_kept=["model.encoder", "model.decoder"],
    mode="eval",
    faint=("k_proj.bias",),
)
WHISPER = transformers.WhisperConfig(
    **ENCODER_DECODER,
    **SPECIAL,
    decoder_start_token_id=1,
    max_source_positions=8,
    max_target_positions=16,
    num_mel_bins=8,
)
entry("whisper_layerdrop", transformers.WhisperForConditionalGeneration, WHISPER, mel_and_target, [], refused=True)
entry(
    "whisper",
    transformers.WhisperForConditionalGeneration,
    WHISPER,
    mel_and_target,
    encoder_decoder_cuts("model.encoder.layers", "model.decoder.layers", "encoder_attn", "proj_out"),
    layers_kept=["model.encoder", "model.decoder"],
    unused=("model.encoder.embed_positions.weight",),
)

# Images and sound.
entry(
    "vit",
    transformers.ViTForImageClassification,
    transformers.ViTConfig(**VISION),
    pixels,
    stack_cuts("vit.layers", "mlp", "classifier"),
    faint=("k_proj.bias",),
)
entry(
    "deit",
    transformers.DeiTForImageClassification,
    transformers.DeiTConfig(**VISION),
    pixels,
    stack_cuts("deit.layers", "mlp", "classifier"),
    faint=("k_proj.bias",),
)
entry(
    "dinov2",
    transformers.Dinov2ForImageClassification,
    transformers.Dinov2Config(**VISION),
    pixels,
    stack_cuts("dinov2.encoder.layer", "mlp", "classifier"),
    faint=("k_proj.bias",),
    unused=("dinov2.embeddings.mask_token",),
)
entry(
    "swin",  # Without stochastic depth, which is made of plain random numbers, in training as in evaluation.
    transformers.SwinForImageClassification,
    transformers.SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.0,
        num_labels=5,
    ),
    large_pixels,
    [
        (["swin.encoder.layers.1"], "between resolutions"),
        (["swin.encoder.layers.0.blocks.1", "swin.encoder.layers.1"], "three stages"),
        (["swin.encoder.layers.0", "swin.encoder.layers.1.blocks.1", "classifier"], "the head alone"),
    ],
    faint=("k_proj.bias",),
)
entry(
    "resnet",
    transformers.ResNetForImageClassification,
    transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 24], depths=[1, 2, 1], layer_type="basic", num_labels=5
    ),
    large_pixels,
    [
        (["resnet.encoder.stages.1"], "between resolutions"),
        (["resnet.encoder.stages.0", "resnet.encoder.stages.1.layers.1"], "between blocks"),
        (["resnet.encoder.stages.0", "resnet.encoder.stages.1", "classifier"], "four stages"),
    ],
)
entry(
    "convnext",
    transformers.ConvNextForImageClassification,
    transformers.ConvNextConfig(hidden_sizes=[8, 16, 24], depths=[1, 2, 1], num_stages=3, num_labels=5),
    large_pixels,
    [
        (["convnext.encoder.stages.1"], "between resolutions"),
        (["convnext.encoder.stages.0", "convnext.encoder.stages.1.layers.1"], "between blocks"),
        (["convnext.encoder.stages.0", "convnext.encoder.stages.1", "classifier"], "four stages"),
    ],
)
entry(
    "clip",  # Its outputs have outputs of two models in them.
    transformers.CLIPModel,
    transformers.CLIPConfig(
        text_config={**ENCODER, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": VOCABULARY - 1},
        vision_config={**VISION, "num_hidden_layers": 2},
        projection_dim=16,
    ),
    pixels_and_text,
    [
        (["text_model"], "images in one stage, text in the other"),
        (["vision_model.encoder.layers.1", "text_model"], "three stages"),
        (["vision_model.encoder.layers.1", "text_model", "text_model.encoder.layers.1"], "four stages"),
    ],
    faint=("k_proj.bias",),
)
# Without SpecAugment, which masks at random by way of NumPy.
WAV2VEC2 = transformers.Wav2Vec2Config(
    **{**ENCODER, "vocab_size": 20},
    conv_dim=(16, 16),
    conv_stride=(4, 2),
    conv_kernel=(8, 3),
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
    mask_time_prob=0.0,
)
entry("wav2vec2_layerdrop", transformers.Wav2Vec2ForCTC, WAV2VEC2, waves, [], refused=True)
entry(
    "wav2vec2",
    transformers.Wav2Vec2ForCTC,
    WAV2VEC2,
    waves,
    stack_cuts("wav2vec2.encoder.layers", "feed_forward", "lm_head"),
    layers_kept=["wav2vec2.encoder"],
    mode="eval",
    faint=("k_proj.bias",),
)


if __name__ == "__main__":
    sys.exit(exporting.main(__doc__, MODELS))
