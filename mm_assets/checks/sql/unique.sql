-- No two rows share sample, position and modality.
select sample_id, position, modality, count(*) as num_rows
from own_rows
group by sample_id, position, modality
having count(*) > 1
order by sample_id, position, modality
