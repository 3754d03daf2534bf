"""embedding: dropout(scale * weight[token] + position[place]), time-major.

V words, P positions, H hidden. The row of the padding token gets no gradient, as in torch.nn.Embedding.
"""

import torch

from lsq.csrc import loader
from lsq.ops.random import dropout as drop
from lsq.ops.random import dropout_threshold, keep_factor
from lsq.ops.registry import OpDefinition, register


def reference(tokens, places, weight, table, key, *, scale, padding, dropout, stream, learned):
    """tokens, places int64 [B, T], weight [V, H], table [P, H] -> x float32 [T * B, H]."""
    x = weight[tokens] * scale + table[places]
    return (drop(x.transpose(0, 1).reshape(-1, weight.shape[1]), dropout, key, stream),)


def cpu(tokens, places, weight, table, key, x, *, scale, padding, dropout, stream, learned):
    batch, time = tokens.shape
    loader.call(
        "lsq_embedding", tokens, places, weight, table, key, stream, dropout_threshold(dropout),
        keep_factor(dropout), float(scale), x, batch, time, weight.shape[1],
    )


def backward_reference(
    gradient, tokens, places, key, *, scale, padding, dropout, stream, learned, vocabulary, positions
):
    """gradient float32 [T * B, H] -> dweight [V, H], dtable [P, H] (None unless learned)."""
    batch, time = tokens.shape
    gradient = drop(gradient, dropout, key, stream).view(time, batch, -1).transpose(0, 1).flatten(0, 1)

    def scatter(indices, size, factor):
        kept = (tokens != padding).flatten()
        out = torch.zeros(size, gradient.shape[1])
        return out.index_add_(0, indices.flatten()[kept], gradient[kept] * factor)

    return scatter(tokens, vocabulary, scale), scatter(places, positions, 1.0) if learned else None


def backward_cpu(
    gradient, tokens, places, key, dweight, dtable,
    *, scale, padding, dropout, stream, learned, vocabulary, positions,
):
    batch, time = tokens.shape
    loader.call(
        "lsq_embedding_backward", gradient, tokens, places, key, stream, dropout_threshold(dropout),
        keep_factor(dropout), float(scale), padding, dweight, vocabulary, dtable, positions, batch, time,
        gradient.shape[1],
    )


def differentiate(builder, operation):
    tokens, places, weight, table, key = operation.inputs
    learned = operation.attributes["learned"]
    builder.emit(
        "embedding_backward",
        (builder.gradient(operation.outputs[0]), tokens, places, key),
        (builder.gradient_output(weight), builder.gradient_output(table) if learned else None),
        vocabulary=weight.shape[0], positions=table.shape[0], **operation.attributes,
    )


register(OpDefinition(name="embedding", reference=reference, cpu=cpu, differentiate=differentiate))
register(OpDefinition(name="embedding_backward", reference=backward_reference, cpu=backward_cpu))
