-- A packed modality is present exactly where its sample has rows, or values in its JSON, for it.
-- Holds if equal: expected_presence, packed_presence.
select sample_id, modality, e.there is not null as is_expected, p.there is not null as is_present
from (select *, 1 as there from expected_presence) as e
full join (select *, 1 as there from packed_presence) as p using (sample_id, modality)
where e.there is null or p.there is null
order by sample_id, modality
