from fsdp_utils.doctor.findings import findings_table as findings_table
