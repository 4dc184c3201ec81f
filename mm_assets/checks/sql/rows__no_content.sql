-- The row table holds no media bytes.
select sample_id, position, modality, content_size
from rows
join rows_content using (ordinal)
where content_size is not null
order by ordinal
