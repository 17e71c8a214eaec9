"""Fields of the model: the backbone with its heads, the probe on its features."""

from fedjax_ssl.fields.section import Section, real, whole, word


def model_fields() -> Section:
    """The backbone, its normalisation and its heads."""
    section = Section()
    # 'cnn', 'lenet', 'resnet8', 'resnet9', 'resnet18', 'resnet34', 'resnet50', 'wrn16_1', 'wrn28_2', 'wrn28_8';
    # 'resnet18_imagenet', whose stem is for images of about 224 x 224 pixels; or your own, see
    # docs/how_to/own_backbone.md. SAGE's is 'resnet8' of width 64, FedMatch's 'resnet9' with normalisation 'none'.
    section.name = "resnet18"
    section.width = whole(0, least=0)  # channels of a ResNet's first stage; 0: 16 of 'resnet8', 64 of the others
    section.anchor_dim = whole(128, least=0)  # width of the anchor head, of the methods that have one
    # Hidden width of the projector and the predictor, of the methods that have them.
    section.projector_hidden = whole(4096, least=1)
    section.projector_dim = whole(2048, least=1)  # width of what they give
    section.normalisation = word("running", "static", "group", "none")  # see docs/concepts/statistics.md
    # Of 'static': whose images they are from. 'moments', of all as 'all', but with the variance between the clients.
    section.statistics = word("server", "cohort", "all", "all_mixed", "moments")
    section.statistics_passes = whole(2, least=1)  # exchanges in a round under 'moments', one a layer at the most
    # Of those batches in their mean: a short one counts as a full one, or 'samples': as its images ((FL)^2). Under
    # 'moments' nothing reads it: every image counts alike.
    section.statistics_weights = word("batches", "samples")
    # How the classifier begins: 'lecun', a normal kernel of variance 1 / fan-in; 'torch', a uniform one of a third of
    # that variance ((FL)^2's and SemiFL's); both with a bias of 0. 'torch_linear': kernels and biases of the classifier
    # and of all heads are uniform within 1 / sqrt(fan-in), as torch.nn.Linear draws them (most public code).
    section.classifier_init = word("lecun", "torch", "torch_linear")
    section.dtype = word("float32", "bfloat16")  # of the computation; parameters are float32
    return section


def probe_fields() -> Section:
    """The classifier of self-supervised methods."""
    # Of the same methods: the classifier, which the server fits to its labelled images' features after each round.
    section = Section()
    # Of the square of its weights, on features of deviation 1, beside the mean square error.
    section.strength = real(0.1, least=1e-4)
    # Of cross-entropy of the whole model on the labelled images, by config.server's optimiser at its learning rate,
    # whatever the schedule, before the model is tested; clients get the model without them.
    section.epochs = whole(0, least=0)
    return section
