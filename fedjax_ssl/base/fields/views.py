"""Fields of augmentation: weak and strong views."""

from fedjax_ssl.base.fields.section import Section, whole, word


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
