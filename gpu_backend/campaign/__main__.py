"""`python -m gpu_backend.campaign --out FOLDER`."""

import sys

from gpu_backend.campaign.campaign import main

sys.exit(main())
