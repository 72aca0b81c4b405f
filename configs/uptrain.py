"""Goes on from a converted checkpoint for alpha of its parent's steps.

  python -m gqa.convert --source=PARENT --target=CONVERTED --num_kv_heads=2
  python -m gqa.train --config=configs/uptrain.py --workdir=DIR \
      --config.init_from=CONVERTED --config.uptrain.alpha=0.05

Model, data and recipe are those of the checkpoint; what is unset here is
looked up there, and a field of the model that is given must agree. The
optimizer is fresh and the learning rate warms up again. Step 0 is the loss
before the first update, and each evaluation has the parent's loss beside it;
with alpha 0 that is all. A step costs what it cost the parent; with
--config.uptrain.distill, the parent's forward pass besides.
"""

from ml_collections import config_dict

from configs import base


def get_config():
  config = base.get_config()
  config.uptrain.alpha = 0.05

  for name, value in config.model.items():
    if value is not None:
      config.model[name] = config_dict.placeholder(type(value))

  train = config.train
  train.num_steps = config_dict.placeholder(int)  # alpha of the parent's
  train.batch_size = config_dict.placeholder(int)
  train.seq_len = config_dict.placeholder(int)

  optim = config.optim
  optim.name = config_dict.placeholder(str)
  optim.learning_rate = config_dict.placeholder(float)  # peak_fraction
  optim.weight_decay = config_dict.placeholder(float)
  optim.warmup_steps = config_dict.placeholder(int)  # warmup_fraction
  optim.schedule = 'linear'
  optim.end_fraction = 0.0

  config.eval.every_steps = 10
  config.checkpoint.every_steps = 100
  return config
