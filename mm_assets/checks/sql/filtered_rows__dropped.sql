-- Every dropped row is one of the materialized rows, and says by which filter and why it went.
-- Holds without rows in: dropped.
select d.sample_id, d.position, d.modality, d.filter, d.reason
from dropped as d
left join materialized_rows as m using (sample_id, position, modality)
where m.sample_id is null or d.filter = '' or d.reason = ''
order by d.sample_id, d.position, d.modality
