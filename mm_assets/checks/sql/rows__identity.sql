-- Every row has a sample id, a position of at least -1 and a known modality.
select r.sample_id, r.position, r.modality, r.ordinal as row_number
from rows as r
left join known_modalities as k using (modality)
where
    r.sample_id is null
    or r.sample_id = ''
    or r.position is null
    or r.position < -1
    or k.modality is null
order by r.ordinal
