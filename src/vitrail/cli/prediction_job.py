"""The SLURM array job of `vitrail predict --sbatch N`: a part of the images in each task."""

import shlex

from vitrail.cli.arguments.evaluation import PredictArguments
from vitrail.cli.signature import format_command
from vitrail.data.image_paths import STDIN
from vitrail.errors import UsageError

_TEMPLATE = """\
#!/bin/bash
# job=$(sbatch --parsable NAME.sbatch) && sbatch --dependency="afterok:$job" --wrap {merge}
#SBATCH --job-name=predict
#SBATCH --array=1-{parts}
#SBATCH --ntasks=1
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@300
#SBATCH --open-mode=append
#SBATCH --output=%x-%A-%a.log

# Each task predicts one part on one GPU. Five minutes before the time limit it gets SIGUSR1, stops after its batch and
# exits with code 75; the task is requeued and continues. A task that failed is repeated by its number, with
# sbatch --array=NUMBER NAME.sbatch. Code 3 says that some images cannot be read; their rows say why.
code=0
srun --kill-on-bad-exit=0 {command} --part "$SLURM_ARRAY_TASK_ID/{parts}" || code=$?

if [ "$code" -eq 75 ]; then
  scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
fi
if [ "$code" -eq 3 ]; then
  code=0
fi
exit "$code"
"""


def make_sbatch_script(arguments: PredictArguments) -> str:
    """Write a SLURM script whose tasks together predict all images, and which says how to merge their files."""
    parts, out = arguments.sbatch, arguments.out
    if parts is None or parts < 1:
        raise UsageError(f"--sbatch is {parts}; it must be at least 1")
    if out is None:
        raise UsageError("--sbatch needs a file for the rows of the parts: give --out")
    if arguments.part is not None or arguments.attention is not None:
        raise UsageError("--sbatch makes the parts itself, and they have no pictures: omit --part and --attention")
    if STDIN in arguments.paths:
        raise UsageError("--sbatch has no standard input: put the list in a file, such as images.csv, column path")
    merge = shlex.quote(shlex.join(["vitrail", "merge", out]))
    command = shlex.join(["vitrail", *format_command("predict", arguments, without=["--sbatch"])])
    return _TEMPLATE.format(parts=parts, merge=merge, command=command)
