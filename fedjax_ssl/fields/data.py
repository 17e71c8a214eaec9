"""Fields of the data: sources, who has labels, the partition."""

from fedjax_ssl.fields.section import Section, real, several, share, whole, word


def residence_fields() -> Section:
    """Where a federation is stored; it changes no result. See docs/how_to/large_federations.md."""
    section = Section()
    # The images: all on the 'device'; or on the 'host', which sends each round's clients' images to the device.
    # 'auto': on the device if they take at most a quarter of its memory.
    section.data = word("auto", "device", "host")
    # The clients' memory: all on the 'device', on the 'host', or on 'disk' in a file of the workdir, with 256 MiB of
    # it on the host. 'auto': the first of these with enough room.
    section.clients = word("auto", "device", "host", "disk")
    return section


def data_fields() -> Section:
    """The images, who holds them, and who has their labels."""
    section = Section()
    # 'digits', 'npz', 'folder', 'csv', or images of Hugging Face's 'datasets'; or from TensorFlow Datasets: cifar10,
    # cifar100, svhn_cropped, mnist, fashion_mnist, emnist/byclass; or of other packages, such as 'breast_cancer',
    # 'reuters8', 'medmnist/bloodmnist'.
    # See docs/data.md.
    section.source = "cifar10"
    section.path = ""  # of the npz (x_train, y_train, x_test, y_test), csv, parquet or folder; see docs/data.md
    section.test_path = ""  # of a csv for testing; '': every fifth row of each class of the labelled rows
    section.label_column = ""  # of a csv or 'datasets'; a row with an empty label is unlabelled
    section.client_column = ""  # of a csv or 'datasets', for the partition 'natural': the client of each row
    section.ignore_columns = ""  # of a csv: columns to leave out, separated by commas
    section.text_column = ""  # of a csv: the column with texts to classify; '': rows of numbers and categories
    section.text_versions = ""  # a second csv with as many rows: its columns are versions of the texts
    section.text_length = whole(64, least=1)  # tokens of a text; longer texts are cut
    section.vocabulary = whole(5000, least=1)  # the largest number of words, the most frequent of the training texts
    section.weak_views = whole(1, least=1)  # of features or texts with V views: how many are weak; these come first
    # Of a folder or 'datasets': resizes images to N x N pixels; 0: they have one size.
    section.image_size = whole(0, least=0)
    # How an image becomes square before it is resized: 'crop' takes the centre, 'stretch' resizes the whole image.
    section.fit = word("crop", "stretch")
    section.tfds_dir = ""  # data_dir of TensorFlow Datasets; '': its default, ~/tensorflow_datasets
    section.flip = False  # of an npz, a folder or 'datasets': whether mirroring an image keeps its class
    section.standardise = True  # subtract channel means, divide by deviations; False: pixels are 0 to 1 (FedMatch)
    # The constants for that: the data set's 'own', or those of 'cifar10' for every data set, as in FedLabel's code.
    section.normalisation = word("own", "cifar10")
    section.labels = word("server", "clients", "some_clients", "profile")  # who has labels; see docs/data.md
    # With 'clients': the share of each client's images that are labelled.
    section.labelled_share = real(0.1, above=0, most=1)
    # With 'clients', instead of the share: labelled images per class and client.
    section.labels_per_class = whole(0, least=0)
    section.num_labelled = whole(0, least=0)  # with 'clients', instead: labelled images in all, balanced, split apart
    section.labelled_clients = whole(1, least=1)  # with 'some_clients': how many have labels for all their images
    section.labelled_rule = word("random", "most_classes")  # which clients those are; see docs/data.md
    # With 'profile': the share of each client's images that has labels, one number a client; or a word, by whose
    # distribution the shares are drawn, as 'beta(a,b)'.
    section.label_profile = ("beta(0.3,0.3)",)
    # A long tail: class c keeps floor(n_max IF^(-c / (C - 1))) training images, drawn by the seed.
    section.imbalance = real(1.0)  # IF, largest class / smallest class; negative: in reversed order; 1: no long tail
    section.largest_class = whole(0, least=0)  # n_max, images of the largest class; 0: the source's smallest class
    # A separate tail for the labelled images, which are then drawn first (ACR): for the server's; with 'clients' for
    # those of num_labelled; with 'some_clients' for those of labelled clients. 0: labelled images follow the tail
    # above.
    section.labelled_largest_class = whole(0, least=0)
    section.labelled_imbalance = real(1.0)  # the IF of that tail
    section.balanced_test = False  # cuts the test set to equally many images of each class
    # Training images held out, the same number for each class; each round is evaluated on them instead of the test set.
    section.validation = whole(0, least=0)
    section.server_labels = whole(500, least=0)  # S, labelled images of the server; with 'server' and 'profile'
    section.server_draw = word("balanced", "random")  # 'balanced': S / C of each class
    # Unknown classes, by their numbers, as in (7, 8, 9): the model does without them, clients alone hold their images,
    # always without labels, and the test set has them apart. See docs/how_to/unknown_classes.md.
    section.unknown_classes = several((), whole(least=0), distinct=True)
    section.unknown_drawn = whole(0, least=0)  # instead: so many classes, drawn by the seed
    # A second data set, all of whose images are unknown, too: a name of data.source, an npz file or a folder.
    section.unknown_source = ""
    section.unknown_share = real(0.25, least=0, below=1)  # of each client's images, besides examples_per_client
    of_dirichlet = ("dirichlet_clients", "dirichlet_pairs", "dirichlet_classes")
    # How the clients' images are partitioned; see docs/data.md.
    section.partition = word("lda", "iid", "stratified", *of_dirichlet, "shards", "profiles", "main_class", "natural")
    # Of the Dirichlet partitions: lower is more heterogeneous. 'dirichlet_pairs' (SAGE) is far milder at the same
    # alpha, since two clients share each of its near-IID parts: do not compare its 0.1 with that of the others.
    section.alpha = real(0.1, above=0)
    section.classes_per_client = whole(2, least=1)  # of the 'shards' partition
    section.main_share = share(0.4)  # of 'main_class': the share of a client's images that belong to its main class
    section.examples_per_client = whole(0, least=0)  # upper bound for each client; 0: none
    # Of each client's images: its own test images, which nobody trains on; see docs/how_to/personal_models.md.
    section.client_test_share = real(0.0, least=0, below=1)
    section.partition_file = ""  # use this saved partition instead
    section.reveal_labels = False  # shows hidden labels to the method: for upper bounds; every table marks it
    section.centralised = False  # the server holds all images with labels: an upper bound; every table marks it
    return section
