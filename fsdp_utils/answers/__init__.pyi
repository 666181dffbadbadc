from fsdp_utils.answers.lookup import Answer as Answer
from fsdp_utils.answers.lookup import explain as explain
from fsdp_utils.answers.lookup import explained_in_a_line as explained_in_a_line
from fsdp_utils.answers.lookup import table as table
