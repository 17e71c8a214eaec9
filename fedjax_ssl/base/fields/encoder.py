"""Fields of a pretrained encoder."""

from fedjax_ssl.base.fields.section import Section, whole, word

ENCODER_NAMES = ("vit_s16", "dinov2_vit_s14", "clip_vit_b32", "efficientnet_lite0", "resnet50")


def encoder_fields() -> Section:
    """A frozen encoder with published weights: see docs/how_to/pretrained_encoders.md."""
    section = Section()
    # The encoder. Every image is encoded once before the first round; model.name, such as 'linear', is trained on the
    # features. With adapters the encoder itself is the backbone, and model.name is ignored. 'none': no encoder.
    section.name = word("none", *ENCODER_NAMES)
    section.weights = ""  # a file made by fedjax-ssl convert-weights
    section.side = whole(0, least=0)  # side in pixels to which images are resized; 0: the encoder's own, 224
    section.weak_views = whole(4, least=1)  # views of each image by config.augment, the first of them the image itself
    section.strong_views = whole(4, least=0)  # views of each image; 0: noise and masked features make the strong view
    section.adapters = adapter_fields()
    return section


def adapter_fields() -> Section:
    """Low-rank adapters of a Vision Transformer, trained instead of a model on fixed features."""
    section = Section()
    section.rank = whole(0, least=0)  # rank r of the adapters; 0: no adapters
    section.blocks = whole(4, least=1)  # how many of the last blocks have adapters
    return section
