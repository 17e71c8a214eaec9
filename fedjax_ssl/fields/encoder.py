"""Fields of a pretrained encoder."""

from fedjax_ssl.fields.section import Section, whole, word

ENCODER_NAMES = ("vit_s16", "dinov2_vit_s14", "clip_vit_b32", "efficientnet_lite0", "resnet50")


def encoder_fields() -> Section:
    """An encoder with published weights, frozen: see docs/how_to/pretrained_encoders.md."""
    section = Section()
    # Encodes every image before the first round, and trains model.name on the features, such as 'linear'. With
    # adapters it is the backbone itself, and model.name is not read. 'none': no encoder.
    section.name = word("none", *ENCODER_NAMES)
    section.weights = ""  # a file that fedjax-ssl convert-weights has made
    section.side = whole(0, least=0)  # to which images are resized, in pixels; 0: the encoder's own, 224
    section.weak_views = whole(4, least=1)  # of each image, the first of them the image itself; by the section augment
    section.strong_views = whole(4, least=0)  # of each image; 0: noise and masked features are the strong view
    section.seed = whole(0, least=0)  # of these views, the same for all seeds of a run
    section.batch_size = whole(64, least=1)  # images encoded at a time
    section.adapters = adapter_fields()
    return section


def adapter_fields() -> Section:
    """Low-rank adapters of a Vision Transformer, trained in the place of features that were computed before."""
    section = Section()
    section.rank = whole(0, least=0)  # r; 0: none
    section.blocks = whole(4, least=1)  # how many of the last blocks have them
    return section
