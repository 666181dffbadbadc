from fsdp_utils.doctor.findings import findings_table as findings_table
from fsdp_utils.doctor.report import page as page
