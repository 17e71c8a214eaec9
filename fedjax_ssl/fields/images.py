"""Fields of what is done to images: weak and strong augmentation, the views of self-supervised methods."""

from fedjax_ssl.fields.section import Section, real, share, whole, word


def augment_fields() -> Section:
    """The weak views and the strong ones."""
    section = Section()
    # Mirrored images: as the data set allows, 'always' (SAGE on SVHN), or 'never'.
    section.flip = word("dataset", "always", "never")
    section.padding = whole(4, least=0)  # pixels around the image before the random crop; 0: no crop
    section.border = word("reflect", "zeros")  # what those are; 'zeros': black (FedLabel)
    # Instead of padding, which must be 0 then: the side in pixels to which images are enlarged before the crop, 40 for
    # images of 32 and 250 for those of 224 (RSCFed, SemiAnAgg). RandAugment sees the enlarged ones if it comes first.
    section.resized = whole(0, least=0)
    # Of RandAugment, see fedjax_ssl/augment/flavours.py; 'none': strong views are weak.
    section.flavour = word("usb", "semifl", "fixmatch", "fedlabel", "fedmatch", "none")
    section.num_ops = whole(2, least=0)  # n of RandAugment: operations for each image
    # Whether flip and crop come before RandAugment: as its flavour has it; or 'geometry_first' ((FL)^2, on 'usb').
    section.order = word("flavour", "geometry_first")
    # m of RandAugment, 0 to 10 ('fedlabel': to 30); 'usb' and 'fedmatch' draw their own.
    section.magnitude = whole(10, least=0, most=30)
    return section


def views_fields() -> Section:
    """The two views of self-supervised methods."""
    # Of self-supervised methods, fedu, fedema and orchestra: two views of each image, changed in this order. Behind the
    # crop comes the flip of augment.flip.
    section = Section()
    # The least part of the image's area that a random crop has, before it is enlarged to the image's size.
    section.smallest_crop = real(0.08, above=0, most=1)
    section.interpolation = word("bilinear", "bicubic")  # of the crop
    section.jitter = share(0.8)  # how often colours are changed, in random order
    section.brightness = real(0.8, least=0)  # by a factor from 1 minus this, or 0, to 1 plus this
    section.contrast = real(0.8, least=0)  # likewise
    section.saturation = real(0.8, least=0)  # likewise
    section.hue = real(0.2, least=0, most=0.5)  # is turned by at most this part of the circle
    section.grey = share(0.2)  # how often the image loses its colours
    section.blur = share(0.0)  # how often the first view is blurred
    section.second_blur = share(0.0)  # and the second one
    section.blur_radius = whole(1, least=1)  # in pixels: a Gaussian of 3 x 3 pixels
    section.second_solarise = share(0.0)  # how often the lighter half of the second view's levels is inverted
    return section
