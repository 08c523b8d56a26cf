from .config import Config as Config
from .data.pipeline import BatchSource as BatchSource
from .errors import UserError as UserError
from .export import export_gguf as export_gguf
from .export import export_hf as export_hf
from .losses.divergences import Divergence as Divergence
from .losses.divergences import JensenShannon as JensenShannon
from .losses.divergences import Mixture as Mixture
from .losses.divergences import SkewedForwardKL as SkewedForwardKL
from .losses.divergences import SkewedReverseKL as SkewedReverseKL
from .losses.divergences import forward_kl as forward_kl
from .losses.divergences import reverse_kl as reverse_kl
from .losses.divergences import total_variation as total_variation
from .losses.kd import KDLoss as KDLoss
from .models.checkpoint import Checkpoint as Checkpoint
from .models.checkpoint import open_checkpoint as open_checkpoint
from .models.decoding import Completion as Completion
from .models.decoding import Sampling as Sampling
from .models.model import Model as Model
from .models.model import load as load
from .training.step import Step as Step
from .training.step import StepMetrics as StepMetrics
from .training.step import TrainState as TrainState
from .training.step import make_step as make_step
from .watch.run import distill as distill

__version__: str
