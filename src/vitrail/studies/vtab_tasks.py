"""The 19 tasks of VTAB-1k (Zhai et al. 2019): groups, classes, augmentation, and where their images come from.

Crop and flip of each task are those of the ViT authors' later code: they must not change the label.
"""

from typing import Literal, NamedTuple

from vitrail.errors import UsageError

TaskGroup = Literal["Natural", "Specialized", "Structured"]
TASK_GROUPS: tuple[TaskGroup, ...] = ("Natural", "Specialized", "Structured")


class VtabTask(NamedTuple):
    """A dataset and a classification task on it."""

    title: str
    group: TaskGroup
    classes: int
    random_crop: bool
    """Whether training crops images rather than using all of them."""
    flip: bool
    origin: str
    """The address of its images, or their name for `vitrail data get`."""

    @property
    def public_dataset(self) -> str | None:
        """The name of its images for `vitrail data get`."""
        return None if "/" in self.origin else self.origin

    @property
    def source(self) -> str:
        """Where its images come from, as text."""
        return f"vitrail data get {self.public_dataset}" if self.public_dataset else f"https://{self.origin}"


_CALTECH_URL = "data.caltech.edu/records/mzrjq-6wc02"
_SUN_URL = "vision.princeton.edu/projects/2010/SUN/"
_DMLAB_URL = "github.com/google-research/task_adaptation"
_CLEVR_URL = "cs.stanford.edu/people/jcjohns/clevr/"
_DSPRITES_URL = "github.com/google-deepmind/dsprites-dataset"
_NORB_URL = "cs.nyu.edu/~ylclab/data/norb-v1.0-small/"
_KITTI_URL = "www.cvlibs.net/datasets/kitti/eval_object.php"
_RETINOPATHY_URL = "www.kaggle.com/c/diabetic-retinopathy-detection"

# fmt: off
TASKS = {  # by the folder names of the widespread lists
    #                             title           group        classes crop  flip   origin
    "caltech101":           VtabTask("Caltech101",   "Natural",     102, True,  True,  _CALTECH_URL),
    "cifar":                VtabTask("CIFAR-100",    "Natural",     100, True,  True,  "cifar100"),
    "dtd":                  VtabTask("DTD",          "Natural",      47, True,  True,  "dtd"),
    "oxford_flowers102":    VtabTask("Flowers102",   "Natural",     102, True,  True,  "flowers102"),
    "oxford_iiit_pet":      VtabTask("Pets",         "Natural",      37, True,  True,  "pets"),
    "svhn":                 VtabTask("SVHN",         "Natural",      10, True,  True,  "svhn"),
    "sun397":               VtabTask("Sun397",       "Natural",     397, True,  True,  _SUN_URL),
    "patch_camelyon":       VtabTask("Camelyon",     "Specialized",   2, True,  True,  "github.com/basveeling/pcam"),
    "eurosat":              VtabTask("EuroSAT",      "Specialized",  10, True,  True,  "github.com/phelber/EuroSAT"),
    "resisc45":             VtabTask("Resisc45",     "Specialized",  45, True,  True,  "gcheng-nwpu.github.io/"),
    "diabetic_retinopathy": VtabTask("Retinopathy",  "Specialized",   5, True,  True,  _RETINOPATHY_URL),
    "clevr_count":          VtabTask("Clevr-Count",  "Structured",    8, False, True,  _CLEVR_URL),
    "clevr_dist":           VtabTask("Clevr-Dist",   "Structured",    6, False, True,  _CLEVR_URL),
    "dmlab":                VtabTask("DMLab",        "Structured",    6, False, True,  _DMLAB_URL),
    "dsprites_loc":         VtabTask("dSpr-Loc",     "Structured",   16, False, False, _DSPRITES_URL),
    "dsprites_ori":         VtabTask("dSpr-Ori",     "Structured",   16, True,  False, _DSPRITES_URL),
    "kitti":                VtabTask("KITTI-Dist",   "Structured",    4, False, True,  _KITTI_URL),
    "smallnorb_azi":        VtabTask("sNORB-Azim",   "Structured",   18, True,  False, _NORB_URL),
    "smallnorb_ele":        VtabTask("sNORB-Elev",   "Structured",    9, True,  True,  _NORB_URL),
}
# fmt: on


def get_task(name: str) -> VtabTask:
    """The task of a folder name."""
    if name not in TASKS:
        raise UsageError(f"VTAB has no task {name!r:.60}; it has {', '.join(TASKS)}")
    return TASKS[name]
