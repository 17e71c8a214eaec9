"""Fields of the model: the backbone with its heads, the probe on its features, a pretrained encoder."""

from fedjax_ssl.base.fields.section import Section, whole, word


def model_fields() -> Section:
    """The backbone, its normalisation and its heads."""
    section = Section()
    # 'cnn', 'lenet', 'resnet8', 'resnet9', 'resnet18', 'resnet34', 'resnet50', 'wrn16_1', 'wrn28_2', 'wrn28_8', 'vit';
    # for images of about 224 x 224 pixels: 'resnet18_imagenet'; for tables and features: 'mlp', or 'linear', a
    # classifier without a backbone; for texts: 'transformer'. Or your own, see docs/how_to/own_backbone.md.
    section.name = "resnet18"
    # Channels of a ResNet's first stage; 0: 16 for 'resnet8', 64 for others. Or the width of 'mlp' (0: 128),
    # 'transformer' (64) and 'vit' (96).
    section.width = whole(0, least=0)
    section.projector_hidden = whole(128, least=1)  # hidden width of the projector and the predictor
    section.projector_dim = whole(64, least=1)  # width of their outputs
    section.normalisation = word("running", "static", "group", "none")  # see docs/concepts/statistics.md
    # With 'static': the images from which statistics are computed; see docs/concepts/statistics.md.
    section.statistics = word("server", "cohort", "all", "all_mixed", "moments")
    section.statistics_passes = whole(2, least=1)  # exchanges per round under 'moments', at most one per layer
    # In the mean of statistics all 'batches' count equally, or by their 'samples' ((FL)^2). 'moments' does not use it.
    section.statistics_weights = word("batches", "samples")
    # Initial classifier: 'lecun', a normal kernel of variance 1 / fan-in; 'torch', a uniform one with a third of that
    # variance ((FL)^2, SemiFL); 'torch_linear', classifier and heads as torch.nn.Linear (most public code).
    section.classifier_init = word("lecun", "torch", "torch_linear")
    section.dtype = word("float32", "bfloat16")  # type of computations; parameters are float32
    return section


def probe_fields() -> Section:
    """The classifier of self-supervised methods."""
    # For fedu, fedema and orchestra: the server fits a linear classifier to its labelled images after each round.
    section = Section()
    # Before testing, fine-tune the whole model on the labelled images for this many epochs, with the
    # server's optimizer at a constant learning rate. Clients continue with the model before fine-tuning.
    section.epochs = whole(0, least=0)
    return section


def encoder_fields() -> Section:
    """A frozen encoder with published weights: see docs/how_to/pretrained_encoders.md."""
    section = Section()
    # The encoder. Every image is encoded once before the first round; model.name, such as 'linear', is trained on the
    # features. With adapters the encoder itself is the backbone, and model.name is ignored. 'none': no encoder.
    section.name = word("none", "vit_s16", "dinov2_vit_s14", "clip_vit_b32", "efficientnet_lite0", "resnet50")
    section.weights = ""  # a file made by fedjax-ssl convert-weights
    section.side = whole(0, least=0)  # side in pixels to which images are resized; 0: the encoder's own, 224
    section.weak_views = whole(4, least=1)  # views of each image by config.augment, the first of them the image itself
    section.strong_views = whole(4, least=0)  # views of each image; 0: noise and masked features make the strong view
    section.adapters = Section()  # low-rank ones of a Vision Transformer, trained instead of a model on fixed features
    section.adapters.rank = whole(0, least=0)  # rank r of the adapters; 0: no adapters
    section.adapters.blocks = whole(4, least=1)  # how many of the last blocks have adapters
    return section
