"""Fields of training: at a client, at the server."""

from fedjax_ssl.base.fields.section import Section, real, share, whole, word


def client_fields() -> Section:
    """Training at a client."""
    section = _sgd_section(learning_rate=0.03, epochs=5, least_epochs=1, batch_size=10, clip_norm=1.0)
    section.optimizer = word("sgd", "adam", "lars")  # 'lars' as in SimCLR; the server's is always SGD
    section.proximal = real(0.0, least=0)  # mu of FedProx: adds mu/2 |w - w_t|^2 to the local loss
    section.spare_classifier = False  # no weight decay or clipping of the classifier (SemiAnAgg's code)
    # For methods with a phase on labelled images only: supervised, fedlabel, fedtrinet, fedavg_semi, semianagg, rscfed,
    # cbafed, fedcd, isofed, fed_consist, imfed_semi, twin_sight. fedlabel ignores labelled_views; fedtrinet uses it in
    # its tuning only.
    section.logit_adjustment = real(0.0, least=0)  # tau: the loss adds tau log(class share) to logits
    # Added to every share, in which a class that the client lacks otherwise counts as half an image (SemiAnAgg's code:
    # 1e-12); 0: not used. Logits of such a class then grow without bound.
    section.share_offset = share(0.0)
    # The loss uses the 'weak' view, or is the mean over 'both' views, weak and strong.
    section.labelled_views = word("weak", "both")
    # For unlabelled images in fedavg_semi, semianagg, rscfed, cbafed, fedcd, isofed, fed_consist, fedirm, imfed_semi
    # and twin_sight; None: as for labelled images.
    section.unlabelled_learning_rate = real(None, above=0)
    section.unlabelled_clip_norm = real(None, least=0)  # the same for clip_norm; 0: no clipping
    return section


def server_fields() -> Section:
    """Training at the server, on its labelled images."""
    # With clipping the server's few steps do not correct what five local epochs on wrong labels do: FixMatch ended at
    # chance on the quickstart.
    section = _sgd_section(learning_rate=0.03, epochs=1, least_epochs=0, batch_size=10, clip_norm=0.0)
    section.augmentation = word("strong", "weak")  # view of the labelled images
    section.pretrain_epochs = whole(5, least=0)  # epochs on the server's labels before the first round
    section.pretrain_learning_rate = real(0.05, above=0)  # learning rate of those epochs
    # With server.persistent: the optimizer state of pre-training is kept for the rounds ((FL)^2's code).
    section.pretrain_persistent = False
    return section


def _sgd_section(learning_rate: float, epochs: int, least_epochs: int, batch_size: int, clip_norm: float) -> Section:
    section = Section()
    section.epochs = whole(epochs, least=least_epochs)  # passes over the training data in a round
    section.batch_size = whole(batch_size, least=1)  # images per step; the last batch of an epoch may be smaller
    # In the first round; see schedule, warm_up_rounds, drop_rounds.
    section.learning_rate = real(learning_rate, above=0)
    section.momentum = real(0.9, least=0, below=1)  # momentum of SGD, which is PyTorch's, and of 'lars'
    section.nesterov = False  # Nesterov momentum
    section.weight_decay = real(5e-4, least=0)  # added to the gradient; 'lars' decays matrices alone
    section.clip_norm = real(clip_norm, least=0)  # largest norm of the whole gradient; 0: no clipping
    section.persistent = False  # keeps optimizer states between rounds: one more model for each of K clients
    return section
