"""What encoders and decoders of models share."""

from argparse import Namespace

from lsq.fairseq.stack import final_norm


def test_pre_norm_stacks_end_in_a_norm():
    args = Namespace(
        decoder_normalize_before=True, decoder_embed_dim=32, encoder_normalize_before=False
    )
    assert final_norm(args, "decoder").weight.shape == (32,)
    assert final_norm(args, "encoder") is None
    args.no_decoder_final_norm = True
    assert final_norm(args, "decoder") is None
