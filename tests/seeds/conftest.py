import pytest
from seed_scenarios import SCENARIO_MODULES

pytest.register_assert_rewrite(
    *SCENARIO_MODULES, "rows_chapter", "rows_runtime", "rows_protocol", "rows_policy"
)
