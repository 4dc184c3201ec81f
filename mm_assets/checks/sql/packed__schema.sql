-- The packed file declares exactly the modalities of the dataset's pack plan: names, order, fields and their settings.
-- Holds if equal: expected_modalities, packed_modalities.
select
    ordinal,
    e.modality as expected_modality,
    a.modality as found_modality,
    e.field as expected_field,
    a.field as found_field,
    e.type_id as expected_type_id,
    a.type_id as found_type_id,
    e.metadata_size as expected_metadata_size,
    a.metadata_size as found_metadata_size,
    e.config as expected_config,
    a.config as found_config
from expected_modalities as e
full join packed_modalities as a using (ordinal)
where
    e.modality is distinct from a.modality
    or e.field is distinct from a.field
    or e.type_id is distinct from a.type_id
    or e.metadata_size is distinct from a.metadata_size
    or e.config is distinct from a.config
order by ordinal
