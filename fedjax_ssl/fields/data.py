"""Fields of the data: sources, who has labels, the division among clients."""

from fedjax_ssl.fields.section import Section, real, share, whole, word


def data_fields() -> Section:
    """Which images there are, who holds them, and who has their labels."""
    section = Section()
    # 'digits', 'npz', 'folder', or of TensorFlow Datasets cifar10, cifar100, svhn_cropped, mnist, fashion_mnist,
    # emnist/byclass: see docs/data.md.
    section.source = "cifar10"
    section.path = ""  # of the npz (x_train, y_train, x_test, y_test) or the folder; see docs/tutorials/your_data.md
    section.image_size = whole(0, least=0)  # for a folder: resize all to N x N pixels; 0: they have one size
    # Before that: cut out the square in the middle, or 'stretch': resize the whole image.
    section.fit = word("crop", "stretch")
    section.tfds_dir = ""  # TensorFlow Datasets' data_dir; '' is its default, ~/tensorflow_datasets
    section.flip = False  # for an npz or a folder: whether a mirrored image is still one of its class
    section.standardise = True  # pixels by the channels' means and deviations; or 0 to 1 alone (FedMatch)
    # By whose: their 'own'; or as public codes have it on every data set: 'cifar10', all by CIFAR-10's (FedLabel), or
    # 'cifar10_in_training', a BUG of SAGE's and ProxyFL's: those who train by CIFAR-10's mean and deviations of 0.247,
    # 0.244 and 0.262, tests by the own ones.
    section.normalisation = word("own", "cifar10", "cifar10_in_training")
    section.labels = word("server", "clients", "some_clients")  # who holds them; see docs/data.md
    # Of 'clients': the part of each client's images that has labels.
    section.labelled_share = real(0.1, above=0, most=1)
    # Of 'clients', instead of the share: so many of each class that a client has.
    section.labels_per_class = whole(0, least=0)
    section.num_labelled = whole(0, least=0)  # of 'clients', instead: so many in all, balanced, divided apart
    section.labelled_clients = whole(1, least=1)  # of 'some_clients': how many have labels for all their images
    section.labelled_rule = word("random", "most_classes")  # which those are; see docs/data.md
    # A long tail: class c keeps floor(n_max IF^(-c / (C - 1))) training images, drawn by the seed.
    section.imbalance = real(1.0)  # IF, the largest class over the smallest; negative: reversed; 1: as the source
    section.largest_class = whole(0, least=0)  # n_max, its images; 0: as many as the smallest of the source has
    # The same of labelled images alone (the server's; of 'clients' those of num_labelled; of 'some_clients' those of
    # the labelled clients), which are then drawn first, as ACR's; 0: they are of the tail above.
    section.labelled_largest_class = whole(0, least=0)
    section.labelled_imbalance = real(1.0)  # of that tail
    section.balanced_test = False  # cut the test set to as many images of each class as the smallest has
    # Training images held out, as many of each class; measured each round, not the test set.
    section.validation = whole(0, least=0)
    section.server_labels = whole(500, least=0)  # S, labelled images of the server, not of clients; of 'server' alone
    section.server_draw = word("balanced", "random")  # 'balanced': S / C of each class
    # How the rest is divided; see fedjax_ssl/data/partition_schemes.py.
    section.partition = word(
        "lda", "iid", "stratified", "dirichlet_clients", "dirichlet_pairs", "dirichlet_classes", "shards", "profiles",
        "main_class",
    )  # fmt: skip
    # Of the Dirichlet partitions: lower is more heterogeneous. In 'dirichlet_pairs' (SAGE) far less than in the others:
    # two clients share each of its near-IID parts, so that its 0.1 is not to be compared with theirs.
    section.alpha = real(0.1, above=0)
    section.classes_per_client = whole(2, least=1)  # of the 'shards' partition
    section.main_share = share(0.4)  # of 'main_class': the part of a client's images that is of its own class
    section.examples_per_client = whole(0, least=0)  # at most so many for each client; 0: all
    section.partition_file = ""  # take this saved partition instead
    section.reveal_labels = False  # to the methods: for upper bounds alone, and marked in every table
    section.centralised = False  # the server holds the clients' images and their labels, too: likewise
    return section
