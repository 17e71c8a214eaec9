"""Fields of what is done to inputs: weak and strong augmentation, the views of self-supervised methods."""

from fedjax_ssl.fields.section import Section, real, share, whole, word


def augment_fields() -> Section:
    """The weak views and the strong ones."""
    section = Section()
    # Random flips: as the 'dataset' allows, 'always' (SAGE on SVHN), or 'never'.
    section.flip = word("dataset", "always", "never")
    section.padding = whole(4, least=0)  # pixels around the image before the random crop; 0: no crop
    section.border = word("reflect", "zeros")  # their content; 'zeros': black (FedLabel)
    # Instead of padding, which must then be 0: enlarges images to this side in pixels before the crop, 40 for images of
    # 32 and 250 for images of 224 (RSCFed, SemiAnAgg). RandAugment sees the enlarged images if it comes first.
    section.resized = whole(0, least=0)
    # Whose RandAugment, see fedjax_ssl/augment/flavours.py; 'none': strong views equal weak ones.
    section.flavour = word("usb", "semifl", "fixmatch", "fedlabel", "fedmatch", "none")
    section.num_ops = whole(2, least=0)  # n of RandAugment: operations per image
    # The order of flip, crop and RandAugment: the flavour's own, or 'geometry_first', flip and crop first ((FL)^2).
    section.order = word("flavour", "geometry_first")
    # m of RandAugment, 0 to 10 ('fedlabel': to 30); 'usb' and 'fedmatch' draw their own.
    section.magnitude = whole(10, least=0, most=30)
    # Of inputs that are no images, see docs/how_to/tables_and_text.md.
    section.noise = real(0.1, least=0)  # features and tables, both views: Gaussian, in deviations of a feature
    # Strong views: the share of features set to their mean, of a table's values made missing, of tokens masked.
    section.masked = share(0.2)
    section.corrupted = share(0.3)  # tables, strong views: the share of values taken from other rows of the batch
    section.deleted = share(0.1)  # texts, both views: the share of tokens deleted
    return section


def views_fields() -> Section:
    """The two views of self-supervised methods."""
    # For fedu, fedema and orchestra: two views of each image, changed in this order. The flip of augment.flip follows
    # the crop.
    section = Section()
    # The smallest share of the image's area that a random crop may have; it is then enlarged to the image's size.
    section.smallest_crop = real(0.08, above=0, most=1)
    section.interpolation = word("bilinear", "bicubic")  # of the crop
    section.jitter = share(0.8)  # probability of changing colours, in random order
    section.brightness = real(0.8, least=0)  # the factor is between max(0, 1 - this) and 1 + this
    section.contrast = real(0.8, least=0)  # likewise
    section.saturation = real(0.8, least=0)  # likewise
    section.hue = real(0.2, least=0, most=0.5)  # the largest turn, as a share of the colour circle
    section.grey = share(0.2)  # probability of losing all colours
    section.blur = share(0.0)  # probability of blurring the first view
    section.second_blur = share(0.0)  # and the second view
    section.blur_radius = whole(1, least=1)  # in pixels; 1: a Gaussian of 3 x 3 pixels
    section.second_solarise = share(0.0)  # probability of inverting the lighter half of the levels, second view
    return section
