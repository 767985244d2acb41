"""A decoder-only transformer over bytes, and sampling from it.

Vaswani et al. 2017, arXiv:1706.03762, with layer normalization before each sublayer (Xiong et al. 2020,
arXiv:2002.04745).
"""

import keras
import tensorflow as tf
from keras import layers

VOCABULARY = 256  # bytes


class Block(layers.Layer):
    """Causal self-attention and an MLP with residual connections. Input and output `[b, t, width]`."""

    def __init__(self, width, heads, dropout, **options):
        super().__init__(**options)
        self.settings, policy = {"width": width, "heads": heads, "dropout": dropout}, self.dtype_policy
        self.attention_norm = layers.LayerNormalization(dtype=policy)
        self.attention = layers.MultiHeadAttention(heads, width // heads, dtype=policy)
        self.mlp_norm = layers.LayerNormalization(dtype=policy)
        self.expand = layers.Dense(4 * width, activation="gelu", dtype=policy)
        self.project = layers.Dense(width, dtype=policy)
        self.dropout = layers.Dropout(dropout, dtype=policy)

    def call(self, x, training=None):
        """Returns the output of the block."""
        normalized = self.attention_norm(x)
        attended = self.attention(normalized, normalized, use_causal_mask=True)
        x += self.dropout(attended, training=training)
        mlp = self.project(self.expand(self.mlp_norm(x)))
        return x + self.dropout(mlp, training=training)

    def get_config(self):
        """Returns the arguments of the constructor."""
        return {**super().get_config(), **self.settings}


def build_transformer(context, num_layers, width, heads, dropout):
    """Returns a model from token ids, int32 `[b, context]`, to logits, float32 `[b, context, 256]`."""
    token_ids = keras.Input((context,), dtype="int32")
    token_embeddings = layers.Embedding(VOCABULARY, width)(token_ids)
    position_embeddings = layers.Embedding(context, width)(tf.range(context)[None])
    x = token_embeddings + position_embeddings
    for _ in range(num_layers):
        x = Block(width, heads, dropout)(x)
    x = layers.LayerNormalization()(x)
    return keras.Model(token_ids, layers.Dense(VOCABULARY, dtype="float32")(x))


def sample_token(logits, temperature, seed):
    """Returns a token id, int32 `[]`, for logits `[256]`. `temperature` 0 selects the likeliest token."""
    token_id = tf.argmax(logits, output_type=tf.int32)
    if temperature > 0:
        scaled = logits[None] / temperature
        token_id = tf.random.stateless_categorical(scaled, 1, seed, tf.int32)[0, 0]
    return token_id


def continue_text(model, prompt, length, temperature, seed):
    """Returns a prompt, a string `[]`, continued by `length` bytes. Called while a graph is traced.

    Each byte is predicted from the newest `context` bytes. A line break precedes the prompt,
    so that an empty prompt works too.
    """
    context = model.input_shape[1]
    token_ids = tf.cast(tf.io.decode_raw(tf.strings.join(["\n", prompt]), tf.uint8), tf.int32)
    token_ids = token_ids[-context:]
    num_tokens = tf.size(token_ids)
    window = tf.pad(token_ids, [[0, context - num_tokens]])
    sampled = tf.TensorArray(tf.int32, length)
    for i in tf.range(length):
        logits = model(window[None], training=False)[0, num_tokens - 1]
        token_id = sample_token(logits, temperature, [i, seed])
        sampled = sampled.write(i, token_id)
        if num_tokens == context:
            window = tf.roll(window, -1, axis=0)
            num_tokens -= 1
        window = tf.tensor_scatter_nd_update(window, [[num_tokens]], [token_id])
        num_tokens += 1
    alphabet = tf.constant([bytes([i]) for i in range(VOCABULARY)])
    return tf.strings.join([prompt, tf.strings.reduce_join(tf.gather(alphabet, sampled.stack()))])
