"""Fields of augmentation: weak and strong views, and the views of self-supervised methods."""

from fedjax_ssl.fields.section import Section, real, share, whole, word


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
    # Version of RandAugment, see fedjax_ssl/augment/flavours.py; 'none': strong views equal weak ones.
    section.flavour = word("usb", "semifl", "fixmatch", "fedlabel", "fedmatch", "none")
    section.num_ops = whole(2, least=0)  # n of RandAugment: operations per image
    # The order of flip, crop and RandAugment: the flavour's own, or 'geometry_first', flip and crop first ((FL)^2).
    section.order = word("flavour", "geometry_first")
    # m of RandAugment, 0 to 10 ('fedlabel': up to 30); 'usb' and 'fedmatch' draw it at random.
    section.magnitude = whole(10, least=0, most=30)
    # For inputs other than images, see docs/how_to/own_data.md.
    section.noise = real(0.1, least=0)  # features and tables, both views: Gaussian, in standard deviations
    # Strong views: the share of features set to their mean, of a table's values set missing, of tokens masked.
    section.masked = share(0.2)
    section.corrupted = share(0.3)  # tables, strong views: the share of values taken from other rows of the batch
    section.deleted = share(0.1)  # texts, both views: the share of tokens deleted
    return section


def views_fields() -> Section:
    """The two views of self-supervised methods."""
    # For fedu, fedema and orchestra: two views of each image, changed in this order, as torchvision does with Pillow.
    # The flip of augment.flip follows the crop.
    section = Section()
    section.smallest_crop = real(0.08, above=0, most=1)  # least area of a crop, a share of the image; it is resized
    section.interpolation = word("bilinear", "bicubic")  # interpolation of the crop
    section.jitter = share(0.8)  # probability of colour jitter, in random order
    section.brightness = real(0.8, least=0)  # b: the factor is drawn between max(0, 1 - b) and 1 + b
    section.contrast = real(0.8, least=0)  # the same for contrast
    section.saturation = real(0.8, least=0)  # the same for saturation
    section.hue = real(0.2, least=0, most=0.5)  # the largest rotation of hue, as a share of the colour circle
    section.grey = share(0.2)  # probability of conversion to grey
    section.blur = share(0.0)  # probability of blurring the first view
    section.second_blur = share(0.0)  # the same for the second view
    section.blur_radius = whole(1, least=1)  # in pixels; 1: a Gaussian kernel of 3 x 3 pixels
    section.second_solarise = share(0.0)  # probability of inverting the lighter half of the levels, second view
    return section
