from tests.constants import let_tests_choose

let_tests_choose()
