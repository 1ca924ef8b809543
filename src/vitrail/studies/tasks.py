"""The 19 tasks of VTAB-1k (Zhai et al. 2019): their groups, classes, training views, and where their images come from.

Crop and flip by task are those of the ViT authors' later code: what a task asks for must survive them.
"""

from typing import Literal, NamedTuple

from vitrail.errors import UsageError

Group = Literal["Natural", "Specialized", "Structured"]
GROUPS: tuple[Group, ...] = ("Natural", "Specialized", "Structured")


class Task(NamedTuple):
    """A set of images and a question about them."""

    title: str
    group: Group
    classes: int
    crop: bool
    """Whether training sees windows of an image rather than all of it."""
    flip: bool
    whence: str
    """Where its images come from, raw: an address, or the name by which `vitrail data get` knows them."""

    @property
    def public(self) -> str | None:
        """The name by which `vitrail data get` knows its images."""
        return None if "/" in self.whence else self.whence

    @property
    def source(self) -> str:
        """Where its images come from, for people."""
        return f"vitrail data get {self.public}" if self.public else f"https://{self.whence}"


_CALTECH = "data.caltech.edu/records/mzrjq-6wc02"
_SUN = "vision.princeton.edu/projects/2010/SUN/"
_DMLAB = "github.com/google-research/task_adaptation"
_CLEVR = "cs.stanford.edu/people/jcjohns/clevr/"
_DSPRITES = "github.com/google-deepmind/dsprites-dataset"
_NORB = "cs.nyu.edu/~ylclab/data/norb-v1.0-small/"
_KITTI = "www.cvlibs.net/datasets/kitti/eval_object.php"
_RETINOPATHY = "www.kaggle.com/c/diabetic-retinopathy-detection"

# fmt: off
TASKS = {  # by the names of the folders that the widespread lists come in
    #                             title           group        classes crop  flip   whence
    "caltech101":           Task("Caltech101",   "Natural",     102, True,  True,  _CALTECH),
    "cifar":                Task("CIFAR-100",    "Natural",     100, True,  True,  "cifar100"),
    "dtd":                  Task("DTD",          "Natural",      47, True,  True,  "dtd"),
    "oxford_flowers102":    Task("Flowers102",   "Natural",     102, True,  True,  "flowers102"),
    "oxford_iiit_pet":      Task("Pets",         "Natural",      37, True,  True,  "pets"),
    "svhn":                 Task("SVHN",         "Natural",      10, True,  True,  "svhn"),
    "sun397":               Task("Sun397",       "Natural",     397, True,  True,  _SUN),
    "patch_camelyon":       Task("Camelyon",     "Specialized",   2, True,  True,  "github.com/basveeling/pcam"),
    "eurosat":              Task("EuroSAT",      "Specialized",  10, True,  True,  "github.com/phelber/EuroSAT"),
    "resisc45":             Task("Resisc45",     "Specialized",  45, True,  True,  "gcheng-nwpu.github.io/"),
    "diabetic_retinopathy": Task("Retinopathy",  "Specialized",   5, True,  True,  _RETINOPATHY),
    "clevr_count":          Task("Clevr-Count",  "Structured",    8, False, True,  _CLEVR),
    "clevr_dist":           Task("Clevr-Dist",   "Structured",    6, False, True,  _CLEVR),
    "dmlab":                Task("DMLab",        "Structured",    6, False, True,  _DMLAB),
    "dsprites_loc":         Task("dSpr-Loc",     "Structured",   16, False, False, _DSPRITES),
    "dsprites_ori":         Task("dSpr-Ori",     "Structured",   16, True,  False, _DSPRITES),
    "kitti":                Task("KITTI-Dist",   "Structured",    4, False, True,  _KITTI),
    "smallnorb_azi":        Task("sNORB-Azim",   "Structured",   18, True,  False, _NORB),
    "smallnorb_ele":        Task("sNORB-Elev",   "Structured",    9, True,  True,  _NORB),
}
# fmt: on


def named(name: str) -> Task:
    """The task of a folder's name."""
    if name not in TASKS:
        raise UsageError(f"VTAB has no task {name!r:.60}; it has {', '.join(TASKS)}")
    return TASKS[name]
