"""`python -m services.expert_shard`."""

from meshfire.runtime.serve import main
from services.expert_shard.config import ExpertShardSettings
from services.expert_shard.server import build

if __name__ == "__main__":
    main("expert_shard", build, ExpertShardSettings)
