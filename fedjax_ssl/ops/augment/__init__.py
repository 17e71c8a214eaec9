"""Image augmentation on the device, inside the compiled training step."""

from fedjax_ssl.ops.augment.flavours import FLAVOURS
from fedjax_ssl.ops.augment.mixup import mix, sample_lambda
from fedjax_ssl.ops.augment.of_images import Views, image_views
from fedjax_ssl.ops.augment.operations import Operation
from fedjax_ssl.ops.augment.randaugment import check_magnitude, rand_augment, strong_augment
from fedjax_ssl.ops.augment.resize import resize
from fedjax_ssl.ops.augment.resized_crop import resized_crop
from fedjax_ssl.ops.augment.views import make_views, quarter_turns
from fedjax_ssl.ops.augment.weak import check_resized, weak_augment
