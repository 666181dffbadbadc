from fsdp_utils.migration.frameworks import translate as translate
from fsdp_utils.migration.translation import Row as Row
from fsdp_utils.migration.translation import Translation as Translation
from fsdp_utils.migration.translation import TranslationError as TranslationError
