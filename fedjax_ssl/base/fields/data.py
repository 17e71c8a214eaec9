"""Fields of the data: sources, who has labels, the partition, views of images."""

from fedjax_ssl.base.fields.section import Section, real, several, share, whole, word


def residence_fields() -> Section:
    """Where a federation is stored; it changes no result. See docs/how_to/large_federations.md."""
    section = Section()
    # Where the images are: all on the 'device'; or on the 'host', which sends the images of each round's clients.
    # 'auto': on the device if they take at most a quarter of its memory.
    section.data = word("auto", "device", "host")
    # Where the memory of clients and the server's records of each client are: on the 'device', on the 'host', or on
    # 'disk' in a file of the workdir, of which 256 MiB are cached on the host. 'auto': the first of these with enough
    # room.
    section.clients = word("auto", "device", "host", "disk")
    return section


def data_fields() -> Section:
    """The images, who holds them, and who has their labels."""
    section = Section()
    # A data set, such as 'cifar10', 'mnist' or 'digits'; or a format, 'npz', 'npy', 'folder', 'csv' or 'datasets'
    # (Hugging Face). All are listed in docs/data.md. With --config.data.path and no source: the format of that path.
    section.source = "cifar10"
    section.path = ""  # path of the npz, csv or parquet file, or of the folder
    section.test_path = ""  # csv: another one for testing; '': every fifth labelled row of each class
    # csv, 'datasets' or a folder's metadata.csv: column of the labels; a row with an empty label is unlabelled.
    section.label_column = ""
    # Of the same: column of each row's client; it decides partition and num_clients. A folder with two levels of
    # folders needs it: which level is the clients, 'first' or 'second'?
    section.client_column = ""
    # Of the same: column of each row's domain, or the level of folders that is the domains.
    section.domain_column = ""
    section.ignore_columns = ""  # csv: columns to leave out, separated by commas
    section.text_column = ""  # csv: column of texts to classify; '': rows of numbers and categories
    section.text_length = whole(64, least=1)  # tokens of a text; longer texts are cut
    section.tokenizer = ""  # texts: path of a tokenizer.json; '': byte-pair encoding, trained on the training texts
    section.vocabulary = whole(5000, least=2)  # largest number of tokens of a tokenizer that is trained
    section.weak_views = whole(1, least=1)  # features, texts: how many of the V views are weak; they come first
    section.image_size = whole(0, least=0)  # folder or 'datasets': resize to N x N pixels; 0: all have one size
    # How an image becomes square before it is resized: 'crop' takes the centre, 'stretch' resizes the whole image.
    section.fit = word("crop", "stretch")
    section.flip = False  # npz, npy, folder or 'datasets': whether mirroring an image keeps its class
    # By which means and deviations inputs are standardised: the data set's 'own'; those of 'cifar10', as in FedLabel's
    # code; or 'none', so that pixels are 0 to 1, as in FedMatch.
    section.normalisation = word("own", "cifar10", "none")
    section.labels = word("server", "clients", "some_clients", "profile")  # who has labels; see docs/data.md
    # With 'clients': the share of each client's images that are labelled.
    section.labelled_share = real(0.1, above=0, most=1, static=True)
    section.labels_per_class = whole(0, least=0)  # with 'clients', instead: labelled images per class and client
    # With 'clients', instead: labelled images in total, balanced over classes. The partitions 'lda', 'iid',
    # 'main_class' and 'profiles' leave out the remainder of their division by clients.
    section.num_labelled = whole(0, least=0)
    section.labelled_clients = whole(1, least=1)  # with 'some_clients': how many clients have all their labels
    section.labelled_rule = word("random", "most_classes")  # which clients those are; see docs/data.md
    # With 'profile': each client's share of labelled images; or the distribution of the shares, such as 'beta(a,b)'.
    section.label_profile = ("beta(0.3,0.3)",)
    # Training images held out, equally many of each class. Rounds are then evaluated on them, not on the test set.
    section.validation = whole(0, least=0)
    # With 'server' and 'profile': S, labelled images of the server. 0 with 'server': nobody has labels.
    section.server_labels = whole(500, least=0)
    section.server_draw = word("balanced", "random")  # 'balanced': S / C of each class, as equal as the data allow
    section.server_domain = ""  # the domain of the server's images, of which clients then have none; '': any
    # Classes that clients hold and the model does not know, such as (7, 8, 9); see docs/how_to/unknown_classes.md.
    section.unknown_classes = several((), whole(least=0), distinct=True)
    # Share of unknown images at each client, in addition to examples_per_client.
    section.unknown_share = real(0.25, least=0, below=1, static=True)
    of_dirichlet = ("dirichlet_clients", "dirichlet_pairs", "dirichlet_classes")
    others = ("stratified", *of_dirichlet, "shards", "profiles", "main_class", "natural", "domains")
    section.partition = word("lda", "iid", *others)  # how the clients' images are partitioned; see docs/data.md
    # Of the Dirichlet partitions: lower is more heterogeneous. 'dirichlet_pairs' (SAGE) is far milder than the others.
    section.alpha = real(0.1, above=0, static=True)
    section.classes_per_client = whole(2, least=1)  # with 'shards': classes of each client
    section.main_share = share(0.4, static=True)  # with 'main_class': share of a client's images of its main class
    section.examples_per_client = whole(0, least=0)  # upper bound for each client; 0: none
    # Share of each client's images that become its own test images; see docs/how_to/personal_models.md.
    section.client_test_share = real(0.0, least=0, below=1, static=True)
    section.partition_file = ""  # a saved partition to use instead
    section.left_out = whole(None, least=0)  # a client that loses its images, to see what it contributes; None: nobody
    section.reveal_labels = False  # shows hidden labels to the method, for an upper bound; every table marks it
    section.centralised = False  # the server holds all images and labels, for an upper bound; every table marks it
    # A long tail: class c keeps floor(n_max IF^(-c / (C - 1))) training images, drawn by the seed; n_max is the size of
    # the source's smallest class. IF, largest class / smallest class; negative: reversed order; 1: no long tail.
    section.imbalance = real(1.0, static=True)
    return section


def augment_fields() -> Section:
    """Weak and strong views."""
    section = Section()
    # Random horizontal flips: as the 'dataset' allows, 'always' (SAGE on SVHN), or 'never'.
    section.flip = word("dataset", "always", "never")
    section.padding = whole(4, least=0)  # pixels around the image before the random crop; 0: no crop
    section.border = word("reflect", "zeros")  # content of that border; 'zeros': black (FedLabel)
    # Instead of padding, which must be 0: resize images to this side in pixels before the crop, as from 32 to 40 or
    # from 224 to 250 (RSCFed, SemiAnAgg). If RandAugment comes first, it gets the resized images.
    section.resized = whole(0, least=0)
    # Version of RandAugment, see fedjax_ssl/ops/augment/flavours.py; 'none': strong views equal weak ones.
    section.flavour = word("usb", "fl2", "semifl", "fixmatch", "fedlabel", "fedmatch", "none")
    section.num_ops = whole(2, least=0)  # n of RandAugment: operations per image
    # m of RandAugment, 0 to 10 ('fedlabel': up to 30); 'usb', 'fl2' and 'fedmatch' draw it at random.
    section.magnitude = whole(10, least=0, most=30)
    return section
